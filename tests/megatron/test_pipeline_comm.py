"""No stage asks another one how long a microbatch is, and none is mistaken."""

import time

import pytest
import torch.distributed as dist

from mrl.megatron.pipeline_comm import P2PCommunicator
from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import ARCHS, MIXTURES, full_weights, make_batch, make_policy, scores, train
from tests.megatron.trainings import assert_same
from tests.ranks import run_ranks

SHORT = {"max_tokens_per_microbatch": 20}
"""Many microbatches of different lengths."""

GROUPS = {"microbatch_group_size_per_vp_stage": 3}
"""More microbatches of a chunk at a time than there are stages."""
EARLY = {"overlap_p2p_comm_warmup_flush": True}
"""Receives are begun before they are needed."""


def _trained(arch, grid, options):
    asked = []
    original = P2PCommunicator._communicate_shapes
    P2PCommunicator._communicate_shapes = lambda self, *args: asked.append(args) or original(self, *args)
    try:
        policy = make_policy(arch, grid, **options)
        before = scores(policy, make_batch(seed=9)) if grid.dp == 1 else None
        lengths = {
            micro.tokens.size(1)
            for micro in policy._forward_backward.microbatches(make_batch(), policy._sampling_distribution)
        }
        return (train(policy, 2), full_weights(policy)), before, len(asked), len(lengths)
    finally:
        P2PCommunicator._communicate_shapes = original


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "grid", "passed"),
    [
        (ARCHS["qwen3"], ParallelLayout(2, pp=2), {}),
        (ARCHS["qwen3"], ParallelLayout(2, pp=2, vpp=2), {}),
        (ARCHS["qwen3"], ParallelLayout(2, pp=2, vpp=2), GROUPS),
        (ARCHS["qwen3"], ParallelLayout(2, pp=2, vpp=2), EARLY),
        (ARCHS["qwen2_untied"], ParallelLayout(4, pp=4), {}),
        (ARCHS["qwen2"], ParallelLayout(4, tp=2, pp=2), {}),
        (ARCHS["qwen2"], ParallelLayout(4, cp=2, pp=2), {}),
        (MIXTURES["qwen3_moe"], ParallelLayout(4, pp=2, vpp=2, ep=2), {}),
    ],
    ids=["pp2", "pp2_vpp2", "pp2_vpp2_groups", "pp2_vpp2_early", "pp4", "tp2_pp2", "cp2_pp2", "ep2_pp2_vpp2"],
)
def test_stages_know_how_long_each_microbatch_is(arch, grid, passed):
    ((plain, scored, _, _),) = run_ranks(1, _trained, arch, ParallelLayout(1), {"actor": SHORT})
    options = {"actor": SHORT, "megatron": {"transformer": passed}}
    for found, before, asked, lengths in run_ranks(grid.world_size, _trained, arch, grid, options):
        assert lengths > 1 and asked == 0
        assert_same(found, plain)
        if before is not None:
            assert (before - scored).abs().max() < 1e-4  # fp32 sums in another order


def _scored_by_a_slow_stage(arch, grid):
    """Scores, where the last stage is late to ask for what the first has sent."""
    policy = make_policy(arch, grid, actor=SHORT, megatron={"transformer": EARLY})
    original = P2PCommunicator._communicate

    def late(self, **given):
        if given["recv_prev"] and dist.get_rank() == grid.world_size - 1:
            time.sleep(0.05)
        return original(self, **given)

    P2PCommunicator._communicate = late
    try:
        return scores(policy, make_batch(seed=9))
    finally:
        P2PCommunicator._communicate = original


def test_a_message_arrives_however_late_it_is_asked_for():
    ((_, plain, _, _),) = run_ranks(1, _trained, ARCHS["qwen3"], ParallelLayout(1), {"actor": SHORT})
    for found in run_ranks(2, _scored_by_a_slow_stage, ARCHS["qwen3"], ParallelLayout(2, pp=2, vpp=2)):
        assert (found - plain).abs().max() < 1e-4
