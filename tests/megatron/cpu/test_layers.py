"""Compiled layers and PyTorch's: the same losses and gradients, in every layout; and all ranks have the same."""

from dataclasses import replace

import pytest
import torch

from mrl.errors import UserError
from mrl.megatron import model
from mrl.megatron.cpu import layers
from mrl.models.kernels import build_cache
from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import ARCHS, CONSTANT, SHALLOW_MIXTURE, algorithm, full_gradients, make_policy, own_part
from tests.megatron.test_prefix_grouper import batch_of, drawn
from tests.ranks import run_ranks

pytestmark = pytest.mark.compiler

GRADIENT = 2e-6  # of the norm of all parameters as one vector; fp32 sums in another order
METRIC = 2e-6  # fp32 sums in another order
ROUNDING = 2e-7  # of a metric that is 0 but for it
CASES = {
    "single": (ParallelLayout(1), ARCHS["qwen2"], {}),
    "tp2_recomputed": (ParallelLayout(2, tp=2), ARCHS["qwen3"], {"recompute": "selective"}),
    "cp2": (ParallelLayout(2, cp=2), ARCHS["qwen2"], {}),
    "dp2_recomputed": (ParallelLayout(2), ARCHS["llama"], {"recompute": "full"}),
    "experts": (ParallelLayout(1), SHALLOW_MIXTURE, {"use_prefix_grouper": False}),
}


def update(grid, arch, actor, compiles):
    """Metrics and gradients of an update, in microbatches."""
    with pytest.MonkeyPatch.context() as patch:
        if not compiles:
            patch.setattr(model, "compiles", lambda dtype: False)
        options = {"clip_grad": 0.0, "use_distributed_optimizer": False, "max_tokens_per_microbatch": 24, **actor}
        policy = make_policy(arch, grid, actor=options)
        policy.start_optimizer(replace(CONSTANT, peak=0.0))  # the weights stay
        batch = own_part(batch_of(drawn()[-1], grid), policy)
        batch.routed_experts_P = None
        return policy.update(batch, algorithm()), full_gradients(policy)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_pytorch(case):
    grid, arch, actor = CASES[case]
    found, right = (run_ranks(grid.world_size, update, grid, arch, actor, compiles) for compiles in (True, False))
    for (metrics, gradients), (expected, others) in zip(found, right, strict=True):
        assert metrics == pytest.approx(expected, rel=METRIC, abs=ROUNDING)
        ours, theirs = (torch.cat([each[name].flatten() for name in sorted(each)]) for each in (gradients, others))
        assert (ours - theirs).norm() <= GRADIENT * theirs.norm()
        assert theirs.norm() > 0


def test_a_rank_that_cannot_compile_where_another_can_is_refused(monkeypatch):
    monkeypatch.setattr(layers, "load_library", lambda dtype: (None, "there is no C compiler"))
    monkeypatch.setattr(layers.build_cache, "first_rank_value", lambda name, own: "compiled")
    with pytest.raises(UserError, match=r"another rank uses compiled.*there is no C compiler"):
        layers.compiles(torch.float32)


def test_ranks_compute_by_pytorch_where_the_first_to_ask_cannot_compile(monkeypatch):
    monkeypatch.setattr(layers.build_cache, "first_rank_value", lambda name, own: "plain")
    assert not layers.compiles(torch.float32)


@pytest.mark.parametrize("by", layers.PRODUCTS)
def test_each_library_multiplies(by):
    x, weight, bias = torch.randn(20, 90)[:, ::2], torch.randn(45, 30).T, torch.randn(30)
    for each in (None, bias):
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if each is None else each.double())
        torch.testing.assert_close(layers.PRODUCTS[by](x, weight, each).double(), expected, atol=1e-5, rtol=0)


def test_the_library_is_chosen_once_on_a_machine_and_by_no_small_lead(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ratio = 0.5
    monkeypatch.setattr(build_cache, "best_times", lambda calls: {"onednn": 1.0, "matmul": ratio})
    assert not layers._by_onednn.__wrapped__()
    ratio = 2.0
    assert not layers._by_onednn.__wrapped__()  # as another process would find it
    assert layers._faster() == "onednn"
    ratio = 0.95
    assert layers._faster() == "onednn"
