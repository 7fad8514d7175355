"""Under truncation the actor scores over what the engine kept: equal weights give a ratio of 1, in every layout."""

import pytest
import torch

from mrl.algorithms.functional.sampling import keep_threshold
from mrl.engines.native.engine import NativeEngine
from mrl.parallel_layout import ParallelLayout
from tests.engines.specs import spec_of
from tests.megatron import truncation
from tests.megatron.actors import ARCHS, CONSTANT, VOCAB, make_batch, make_policy
from tests.megatron.truncation import CUTS
from tests.ranks import run_ranks

RATIO = 1e-5
"""The project's bound."""
RELATIVE = 1e-4  # fp32 sums in another order, through an update of Adam
LAYOUTS = {
    "tp2": ParallelLayout(2, tp=2, rollout_tp=2),
    "dp2": ParallelLayout(2),
    "pp2": ParallelLayout(2, pp=2),
    "pp2_vpp2": ParallelLayout(2, pp=2, vpp=2, rollout_tp=2),
    "cp2": ParallelLayout(2, cp=2),
    "tp2_pp2": ParallelLayout(4, tp=2, pp=2),
}


def step(grid, cuts, actor=None):
    """By cut: ratios, uncorrected ratios, kept masses, entropies, and the metrics of two updates."""
    groups, found = None, {}
    for name in cuts:
        policy = make_policy(ARCHS["qwen2"], grid, rollout=vars(truncation.rollout_config(CUTS[name])), groups=groups,
                             actor=actor)  # fmt: skip
        groups = policy._groups
        spec = spec_of(truncation.rollout_config(CUTS[name], gpu_memory_utilization=0.01), ARCHS["qwen2"],
                       tp_group=groups.rollout_tp)  # fmt: skip
        engine = NativeEngine(spec)
        data, mass = truncation.sampled(policy, engine, CUTS[name])
        batch = data.batch
        assert (batch.kept_tokens_R is None) == (groups.coords.pp < grid.pp - 1)
        logprobs_R, entropy_R = policy.score(batch)
        told = torch.stack([logprobs_R, truncation.uncorrected(policy, batch)]) - batch.rollout_logprobs_R
        ordered = truncation.in_order(policy, batch, torch.cat([told, entropy_R[None]]))
        policy.start_optimizer(CONSTANT)
        found[name] = (*ordered[:2].exp(), mass, ordered[2], truncation.updated(policy, data))
    return found


@pytest.fixture(scope="module")
def single():
    return run_ranks(1, step, ParallelLayout(1), list(CUTS))[0]


@pytest.mark.parametrize("name", CUTS)
def test_equal_weights_give_a_ratio_of_1_and_without_the_support_the_kept_mass(name, single):
    ratios, without, mass, _, updates = single[name]
    assert (ratios - 1).abs().max() < RATIO
    torch.testing.assert_close(without, mass, rtol=RATIO, atol=0)
    assert mass.mean() < 0.97  # the bias that is mended
    assert updates[0]["training/rollout_probs_diff_max"] < RATIO


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_ratios_and_the_updates_of_one_rank(layout, single):
    names = ["top_p", "together"]
    for found in run_ranks(LAYOUTS[layout].world_size, step, LAYOUTS[layout], names):
        for name in names:
            assert (found[name][0] - 1).abs().max() < RATIO
            for ours, theirs in zip(found[name][2:4], single[name][2:4], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=RELATIVE, atol=RELATIVE)
            for ours, theirs in zip(found[name][4], single[name][4], strict=True):
                assert ours == pytest.approx(theirs, rel=RELATIVE, abs=1e-5)


@pytest.mark.parametrize("actor", [{"max_tokens_per_microbatch": 8}, {"logprob_chunk_tokens": 1}], ids=str)
def test_microbatches_and_chunks_change_nothing(actor, single):
    (found,) = run_ranks(1, step, ParallelLayout(1), ["together"], actor)
    for ours, theirs in zip(found["together"][:4], single["together"][:4], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=RELATIVE, atol=RELATIVE)
    for ours, theirs in zip(found["together"][4], single["together"][4], strict=True):
        assert ours == pytest.approx(theirs, rel=RELATIVE, abs=1e-5)


def after_an_update(grid):
    """At one position: what was kept, what the new weights would keep, and the probabilities of the former."""
    cut = CUTS["top_k"]
    policy = make_policy(ARCHS["qwen2"], grid, rollout=vars(truncation.rollout_config(cut)))
    engine = NativeEngine(spec_of(truncation.rollout_config(cut, gpu_memory_utilization=0.01), ARCHS["qwen2"]))
    data, _ = truncation.sampled(policy, engine, cut)
    policy.start_optimizer(truncation.FAR)
    truncation.updated(policy, data)
    batch = data.batch.select([0])
    kept = truncation.last_support(batch)
    every = truncation.uncorrected(policy, truncation.of_each(batch, list(range(VOCAB))))
    lens = [int(batch.response_lens_B)] * VOCAB
    whole = torch.stack([part[-1] for part in every.split(lens)])
    now = (whole >= keep_threshold(whole[None], 5, 1.0, 0.0)).nonzero().flatten().tolist()
    found = policy.score(truncation.of_each(batch, kept))[0].split(lens[: len(kept)])
    return kept, now, torch.stack([part[-1] for part in found]).exp(), whole[kept].softmax(0)


def test_after_an_update_the_support_is_still_the_engines():
    ((kept, now, probabilities, expected),) = run_ranks(1, after_an_update, ParallelLayout(1))
    assert set(kept) != set(now)  # a cut of the trainer's own would be another
    torch.testing.assert_close(probabilities, expected, rtol=1e-4, atol=1e-6)
    assert abs(float(probabilities.sum()) - 1) < RATIO


def without_support(grid):
    policy = make_policy(ARCHS["qwen2"], grid, rollout={"top_k": 5})
    with pytest.raises(RuntimeError, match="the batch has no kept_tokens_R"):
        policy.score(make_batch(4))


def test_samples_without_their_support_are_not_scored_under_truncation():
    run_ranks(1, without_support, ParallelLayout(1))
