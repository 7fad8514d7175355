"""FP8 emulated on a CPU: values of each recipe, gradients, every layout, and padding that changes nothing."""

from dataclasses import replace

import pytest
import torch

from mrl.config.megatron_fields.fp8 import ROW_ALIGNMENT, Fp8Training, fp8_training, row_unit
from mrl.errors import UserError
from mrl.megatron import model
from mrl.megatron.cpu.fp8_emulation import RECIPES, _Fp8Product, check_emulation, emulate_fp8, rounded_to_fp8
from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import (
    CONSTANT,
    MIXTURES,
    VOCAB,
    algorithm,
    full_gradients,
    make_batch,
    make_critic,
    make_policy,
    own_part,
    scores,
)
from tests.ranks import run_ranks

WIDE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64,
        "num_key_value_heads": 2, "intermediate_size": 256}  # fmt: skip
ARCH = arch_from_preset("qwen3_tiny", WIDE, VOCAB)
"""Blocks of 128 x 128 are the same with two tensor-parallel ranks."""
GRADIENT = 1e-2  # of the norm: another order of fp32 additions moves a few values across a rounding boundary of FP8
METRIC = 1e-3
SMALLEST = 1e-6
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def fp8(recipe="blockwise", **fields):
    return {"transformer": {"fp8": "e4m3", "fp8_recipe": recipe, **fields}}


def reference(values, block, dtype, *, power_of_two):
    """One block at a time, one scale as a Python float."""
    rows, columns = block or values.shape
    found = torch.empty(values.shape, dtype=torch.float64)
    largest = 448 if dtype == E4M3 else 57344
    for top in range(0, values.size(0), rows):
        for left in range(0, values.size(1), columns):
            place = slice(top, top + rows), slice(left, left + columns)
            part = values[place].double()
            scale = float(part.abs().max()) / largest or 1.0
            if power_of_two:
                scale = next(2.0**exponent for exponent in range(-126, 127) if 2.0**exponent >= scale)
            found[place] = (part / scale).float().clamp(-largest, largest).to(dtype).double() * scale
    return found


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("block", [None, (1, 128), (128, 128), (1, 32)], ids=str)
@pytest.mark.parametrize("power_of_two", [False, True], ids=["exact", "power_of_two"])
def test_values_are_those_of_torchs_cast_in_each_block(block, dtype, power_of_two):
    torch.manual_seed(0)
    values = torch.randn(150, 290) * torch.logspace(-6, 3, 290)
    values[:, :40] = 0
    found = rounded_to_fp8(values, block, dtype, power_of_two=power_of_two).double()
    expected = reference(values, block, dtype, power_of_two=power_of_two)
    step = 2.0 ** (-3 if dtype == E4M3 else -2)
    apart = (found - expected).abs()
    # the multiplier is rounded to fp32, so that a value near the middle of two may go to the other
    assert (apart > 1e-6 * expected.abs()).float().mean() < 1e-3
    assert (apart <= 1.01 * step * expected.abs() + 1e-12 * values.abs().max()).all()
    assert (found[:, :40] == 0).all()
    assert found.dtype == torch.float64 and torch.isfinite(found).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["e4m3", "hybrid"])
def test_a_product_and_its_gradients_are_those_of_rounded_operands(recipe, kind):
    torch.manual_seed(1)
    x, weight, bias = torch.randn(6, 1, 256, requires_grad=True), torch.randn(160, 256), torch.randn(160)
    weight.requires_grad_()
    bias.requires_grad_()
    product = _Fp8Product.apply(x, weight, bias, None, Fp8Training(kind, recipe))
    grad = torch.randn(6, 1, 160)
    product.backward(grad)
    how = RECIPES[recipe]
    options = {"power_of_two": how.power_of_two}
    rows = rounded_to_fp8(x[:, 0], how.rows, E4M3, **options)
    columns = rounded_to_fp8(weight, how.weights, E4M3, **options)
    back = rounded_to_fp8(grad[:, 0], how.rows, E5M2 if kind == "hybrid" else E4M3, **options)
    torch.testing.assert_close(product[:, 0], rows @ columns.T + bias, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x.grad[:, 0], back @ columns, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(weight.grad, back.T @ rows, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(bias.grad, grad.sum((0, 1)))
    exact = x[:, 0] @ weight.T + bias
    assert 1e-3 < (product[:, 0] - exact).norm() / exact.norm() < 0.1


def update(grid, options, unit=None, compiles=True):
    """Metrics, gradients and scores of one update whose learning rate is 0."""
    with pytest.MonkeyPatch.context() as patch:
        if not compiles:
            patch.setattr(model, "compiles", lambda dtype: False)
        actor = {"clip_grad": 0.0, "use_distributed_optimizer": False, **options.get("actor", {})}
        policy = make_policy(ARCH, grid, **{**options, "actor": actor})
        if unit is not None:
            policy._forward_backward._row_unit = unit
        policy.start_optimizer(replace(CONSTANT, peak=0.0))
        scored = scores(policy, own_part(make_batch(), policy))
        return policy.update(own_part(make_batch(), policy), algorithm()), full_gradients(policy), scored


def distance(gradients, right):
    """Norm of the difference of all gradients, as a fraction of theirs."""
    ours, theirs = (torch.cat([each[name].flatten() for name in sorted(each)]) for each in (gradients, right))
    return (ours - theirs).norm() / theirs.norm()


def assert_alike(found, expected):
    for (metrics, gradients, _), (others, right, _) in zip(found, expected * len(found), strict=False):
        assert metrics == pytest.approx(others, rel=METRIC, abs=SMALLEST)
        assert distance(gradients, right) <= GRADIENT


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_padding_and_other_microbatches_change_nothing(recipe):
    options = {"megatron": fp8(recipe)}
    first = run_ranks(1, update, ParallelLayout(1), options)
    assert_alike(run_ranks(1, update, ParallelLayout(1), options, 1), first)
    small = {**options, "actor": {"max_tokens_per_microbatch": 20}}
    assert_alike(run_ranks(1, update, ParallelLayout(1), small), first)


LAYOUTS = {
    "tp2": (ParallelLayout(2, tp=2), {}),
    "tp2_without_sequence_parallel": (ParallelLayout(2, tp=2), {"parallel": {"sequence_parallel": False}}),
    "pp2": (ParallelLayout(2, pp=2), {}),
    "cp2": (ParallelLayout(2, cp=2), {}),
    "recomputed": (ParallelLayout(1), {"actor": {"recompute": "full"}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts_compute_the_same(case, recipe):
    grid, options = LAYOUTS[case]
    expected = run_ranks(1, update, ParallelLayout(1), {"megatron": fp8(recipe)})
    assert_alike(run_ranks(grid.world_size, update, grid, {"megatron": fp8(recipe), **options}), expected)


@pytest.mark.compiler
def test_compiled_layers_and_pytorchs_compute_the_same():
    options = {"megatron": fp8()}
    found, expected = (run_ranks(1, update, ParallelLayout(1), options, None, each) for each in (True, False))
    assert_alike(found, expected)


def _layers_in_fp8(grid, options):
    """Global number of each layer of a rank, and whether its products are replaced."""
    policy = make_policy(ARCH, grid, **options)
    return {
        layer.layer_number: {
            "_forward_impl" in vars(module)
            for name, module in layer.named_modules()
            if name.rpartition(".")[2] in NAMES
        }
        for chunk in policy.chunks
        for layer in chunk.decoder.layers
    }


NAMES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
FIRST_PLAIN = fp8(first_last_layers_bf16=True, num_layers_at_end_in_bf16=0)


def test_first_layers_stay_plain_in_a_pipeline():
    found = run_ranks(2, _layers_in_fp8, ParallelLayout(2, pp=2), {"megatron": FIRST_PLAIN})
    assert found == [{1: {False}}, {2: {True}}]


def test_without_a_quantized_layer_nothing_changes_and_each_quantized_layer_does():
    plain, none, some, every = (
        run_ranks(1, update, ParallelLayout(1), {"megatron": each}, 1)[0]
        for each in ({}, fp8(first_last_layers_bf16=True), FIRST_PLAIN, fp8())
    )
    assert none[0] == plain[0] and torch.equal(none[2], plain[2])
    apart = [(each[2][0] - plain[2][0]).abs().mean() for each in (some, every)]
    assert 1e-4 < apart[0] < apart[1] < 0.5
    assert distance(every[1], plain[1]) > 3 * GRADIENT


def _ratio_of_own_scores(recipe, dtype):
    policy = make_policy(ARCH, ParallelLayout(1), megatron=fp8(recipe), dtype=dtype)
    policy.start_optimizer(CONSTANT)
    batch = make_batch()
    batch.rollout_logprobs_R = policy.score(batch)[0]
    return policy.update(batch, algorithm())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_update_computes_the_log_probabilities_that_scoring_did(recipe, dtype):
    metrics = run_ranks(1, _ratio_of_own_scores, recipe, dtype)[0]
    assert metrics["actor/ppo_kl"] == 0
    assert metrics["actor/grad_norm"] > 0


def _values(options):
    critic = make_critic(ARCH, ParallelLayout(1), **options)
    return critic.values(make_batch())


def test_a_critic_is_quantized_too():
    plain, rounded = (run_ranks(1, _values, options)[0] for options in ({}, {"megatron": fp8()}))
    assert not torch.equal(plain, rounded)


def test_a_recipe_without_emulation_and_a_model_with_experts_are_refused():
    with pytest.raises(UserError, match="fp8_recipe=delayed has no emulation"):
        emulate_fp8(torch.nn.Linear(2, 2), Fp8Training("e4m3", "delayed"))
    with pytest.raises(UserError, match="without experts"):
        check_emulation(MIXTURES["mixtral"], torch.device("cpu"))
    with pytest.raises(UserError, match="needs TransformerEngine"):
        check_emulation(ARCH, torch.device("cuda"))


@pytest.mark.parametrize(
    ("grid", "recipe", "unit"),
    [
        (ParallelLayout(1), None, 1),
        (ParallelLayout(4, tp=2, cp=2), None, 8),
        (ParallelLayout(1), "blockwise", 128),
        (ParallelLayout(1), "mxfp8", 32),
        (ParallelLayout(2, tp=2), "tensorwise", 32),
        (ParallelLayout(6, tp=3, cp=2), "tensorwise", 96),
        (ParallelLayout(4, tp=2, cp=2), "blockwise", 512),
    ],
)
def test_rows_of_a_rank_are_a_multiple_of_the_recipes(grid, recipe, unit):
    fields = fp8(recipe)["transformer"] if recipe else {}
    assert row_unit(grid, fields) == unit
    if recipe:
        assert unit // (grid.tp * grid.cp) % ROW_ALIGNMENT[recipe] == 0
        assert fp8_training(fields) == Fp8Training("e4m3", recipe)
