"""RMSNorm is the formula with its gradient, and marks its weight where the sequence is sharded."""

from types import SimpleNamespace

import pytest
import torch

from mrl.megatron.norm import PostNorm, RMSNorm

OFFSETS = {False: 0.0, True: 1.0}
"""Zero-centered weights -> what is added to them."""
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}  # a few units in the last place of each type


def norm_of(width, dtype=torch.float32, *, zero_centered=False, sequence_parallel=False):
    config = SimpleNamespace(
        params_dtype=dtype, sequence_parallel=sequence_parallel, layernorm_zero_centered_gamma=zero_centered
    )
    return RMSNorm(config, width, eps=1e-3)


@pytest.mark.parametrize("zero_centered", OFFSETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_are_divided_by_their_root_mean_square(dtype, zero_centered):
    norm = norm_of(8, dtype, zero_centered=zero_centered)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 8))
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = x.double()
    expected = (
        exact / (exact.square().mean(1, keepdim=True) + 1e-3).sqrt() * (norm.weight.double() + OFFSETS[zero_centered])
    )
    found = norm(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("zero_centered", OFFSETS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients_are_those_of_float64(dtype, zero_centered):
    generator = torch.Generator().manual_seed(1)
    norm = norm_of(8, dtype, zero_centered=zero_centered)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 8))
    x = torch.randn(5, 1, 3, 8, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(x.shape, generator=generator).to(dtype)
    exact, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    factor = weight + OFFSETS[zero_centered]
    (exact / (exact.square().mean(-1, keepdim=True) + 1e-3).sqrt() * factor).backward(grad.double())
    norm(x).backward(grad)
    for found, expected in ((x.grad, exact.grad), (norm.weight.grad, weight.grad)):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=5 * TOLERANCE[dtype])


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_weight_says_whether_ranks_see_parts_of_the_sequence(sequence_parallel):
    """Without the mark Megatron does not add up the ranks' gradients."""
    norm = norm_of(4, sequence_parallel=sequence_parallel)
    assert norm.weight.sequence_parallel is sequence_parallel


@pytest.mark.parametrize("needed", [True, False])
def test_a_norm_of_an_output_keeps_a_graph_only_where_the_layer_has_one(needed):
    """Megatron enables gradients around it, also in passes without them."""
    config = SimpleNamespace(
        params_dtype=torch.float32,
        sequence_parallel=False,
        layernorm_zero_centered_gamma=True,
        hidden_size=4,
        layernorm_epsilon=1e-6,
    )
    output, residual = torch.randn(2, 4, requires_grad=needed), torch.randn(2, 4)
    found = PostNorm(config, RMSNorm)(True, False)((output, None), residual, 0.0)
    expected = residual + 2 * torch.nn.functional.rms_norm(output, (4,), eps=1e-6)
    torch.testing.assert_close(found, expected)  # the weight is one
    assert found.requires_grad == needed
