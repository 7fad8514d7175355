"""The smallest layout keeps every dimension that splits something, as long as the ranks can hold it."""

from dataclasses import replace

import pytest

from mrl.commands.rehearse.layout import WEIGHTS, sizes, smallest_like
from mrl.parallel_layout import ParallelLayout

DENSE = ParallelLayout(64, tp=8, pp=4, rollout_tp=8)
EXPERTS = ParallelLayout(
    256, tp=4, pp=8, ep=8, etp=1, rollout_tp=32, rollout_ep=32, first_stage_layers=11, last_stage_layers=11
)
CUT_EXPERTS = ParallelLayout(256, tp=4, cp=2, pp=2, ep=4, etp=2, rollout_tp=8, rollout_ep=4)
CONTEXT = ParallelLayout(64, tp=4, cp=2, pp=4, vpp=2, rollout_tp=2)


ROLES = ParallelLayout(16, tp=2, rollout_tp=1, rollout_ranks=8)
EXPERT_ROLES = ParallelLayout(32, tp=2, ep=8, etp=1, rollout_tp=4, rollout_ep=4, rollout_ranks=16)


def lost(asked, used, *, experts):
    before, after = sizes(asked, experts=experts), sizes(used, experts=experts)
    assert all(after[name] == 1 for name in before if before[name] == 1), "nothing is split that was not"
    return {name for name in before if before[name] > 1 and after[name] == 1}


@pytest.mark.parametrize(("asked", "experts"), [(DENSE, False), (EXPERTS, True)])
def test_eight_ranks_hold_every_dimension_of_three_that_split(asked, experts):
    used = smallest_like(asked, 8, experts=experts)
    assert used.world_size == 8 and lost(asked, used, experts=experts) == set()
    assert (used.rollout_tp > used.tp) == (asked.rollout_tp > asked.tp)


def test_a_layout_that_fits_stays_as_it_is():
    assert smallest_like(ParallelLayout(8, tp=2, rollout_tp=2), 8, experts=False) == ParallelLayout(
        8, tp=2, rollout_tp=2
    )


@pytest.mark.parametrize(
    ("asked", "experts", "max_ranks", "gone"),
    [
        (CONTEXT, False, 16, set()),
        (CONTEXT, False, 8, {"data parallel"}),
        (CUT_EXPERTS, True, 8, {"data parallel", "expert data parallel"}),
        (EXPERTS, True, 4, {"data parallel", "expert data parallel"}),
    ],
)
def test_what_does_not_fit_gives_way_by_its_weight(asked, experts, max_ranks, gone):
    used = smallest_like(asked, max_ranks, experts=experts)
    assert used.world_size <= max_ranks and lost(asked, used, experts=experts) == gone


@pytest.mark.parametrize("asked", [DENSE, EXPERTS, CUT_EXPERTS, CONTEXT])
@pytest.mark.parametrize("max_ranks", [1, 2, 3, 6, 8, 16])
def test_every_layout_found_is_one_that_ranks_can_take(asked, max_ranks):
    used = smallest_like(asked, max_ranks, experts=asked.ep > 1)
    stage = used.world_size // used.pp
    assert used.world_size == used.tp * used.cp * used.pp * used.dp <= max_ranks
    assert stage % (used.ep * used.expert_tp) == 0 and used.world_size % used.rollout_tp == 0
    assert used.rollout_tp % used.rollout_ep == 0 and (used.pp > 1 or used.vpp == 1)
    assert used.ep > 1 or used.expert_tp == used.tp


@pytest.mark.parametrize("asked", [ROLES, EXPERT_ROLES])
@pytest.mark.parametrize("max_ranks", [1, 2, 3, 6, 8, 12])
def test_ranks_of_their_own_stay_so(asked, max_ranks):
    used = smallest_like(asked, max_ranks, experts=asked.ep > 1)
    assert used.has_separate_rollout and used.world_size <= max(2, max_ranks)
    assert used.tp * used.dp == len(used.trainers) and len(used.samplers) == used.num_replicas * used.rollout_tp
    assert len(used.trainers) % (used.ep * used.expert_tp) == 0 and used.rollout_tp % used.rollout_ep == 0
    if max_ranks >= 8:
        assert lost(asked, used, experts=asked.ep > 1) == set()


def test_replicas_lose_their_pipeline():
    assert smallest_like(replace(DENSE, rollout_tp=4, rollout_pp=2), 64, experts=False).rollout_pp == 1


def test_every_dimension_has_a_weight_and_a_layout_its_fewest_ranks():
    assert set(WEIGHTS) == set(sizes(EXPERTS, experts=True))
    assert CUT_EXPERTS.min_world_size == 16 and EXPERTS.min_world_size == 64 and ParallelLayout(1).min_world_size == 1
