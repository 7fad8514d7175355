"""Attention of grouped queries: by which kernels it may go on a GPU, and that both ways compute the same."""

import pytest
import torch

from mrl.models.kernels import sdpa

LOW = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_only_flash_attention_takes_groups_on_a_gpu_and_it_has_neither_masks_nor_float32(dtype, masked):
    assert sdpa.takes_groups("cuda", dtype, 128, masked=masked) == (dtype in LOW and not masked)
    assert not sdpa.takes_groups("cuda", dtype, 576, masked=masked)
    assert sdpa.takes_groups("cpu", dtype, 576, masked=masked)


MASKS = {
    "causal": None,
    "a few keys": torch.ones(5, 5, dtype=torch.bool).tril(),
    "added": torch.zeros(2, 1, 5, 5).masked_fill_(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 6), (4, 1)])
def test_repeated_heads_give_what_groups_give(name, heads, kv_heads, monkeypatch):
    """Also their gradients, and whatever kernel torch takes."""
    found = []
    for takes in (True, False):
        monkeypatch.setattr(sdpa, "takes_groups", lambda *_, masked, takes=takes: takes)
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, n, 5, 8, generator=generator) for n in (heads, kv_heads, kv_heads))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = sdpa.attend(*inputs, MASKS[name], 0.3)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        found.append([out, *(x.grad for x in inputs)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("takes", [True, False])
def test_keys_may_be_the_values(takes, monkeypatch):
    monkeypatch.setattr(sdpa, "takes_groups", lambda *_, masked: takes)
    q, k = torch.randn(2, 6, 5, 8), torch.randn(2, 1, 5, 8)
    torch.testing.assert_close(sdpa.attend(q, k, k, None), sdpa.attend(q, k, k.clone(), None))


@pytest.mark.parametrize("groups", [1, 3])
def test_it_is_softmax_of_scaled_scores(groups):
    q, k, v = torch.randn(1, 2 * groups, 4, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * 0.5
    scores = scores.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -torch.inf)
    expected = scores.softmax(-1) @ v.repeat_interleave(groups, 1)
    assert torch.allclose(sdpa.attend(q, k, v, None, 0.5), expected, atol=1e-5)
