"""The order of ranks is Megatron's."""

from dataclasses import replace

import pytest

from mrl.megatron.parallel_state import parallel_state
from mrl.parallel_layout import Coords, ParallelLayout

GRIDS = [
    ParallelLayout(8, tp=2, pp=2),
    ParallelLayout(16, tp=2, cp=2, pp=2),
    ParallelLayout(16, tp=2, pp=2, ep=4, etp=1),
    ParallelLayout(16, tp=4, cp=2, ep=2, etp=2),
    ParallelLayout(32, tp=2, cp=2, pp=2, ep=4),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_ranks_of_a_group_differ_in_its_coordinate_alone(grid):
    generator = parallel_state.RankGenerator(
        tp=grid.tp, ep=1, dp=grid.dp, pp=grid.pp, cp=grid.cp, order="tp-cp-ep-dp-pp"
    )
    for name in ("tp", "cp", "dp", "pp"):
        for ranks in generator.get_ranks(name):
            places = [grid.coords(rank) for rank in ranks]
            assert [getattr(place, name) for place in places] == list(range(getattr(grid, name)))
            others = {tuple(value for key, value in vars(place).items() if key != name) for place in places}
            assert len(others) == 1


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_ranks_of_an_expert_group_too(grid):
    edp = grid.world_size // (grid.pp * grid.ep * grid.expert_tp)
    generator = parallel_state.RankGenerator(
        tp=grid.expert_tp, ep=grid.ep, dp=edp, pp=grid.pp, cp=1, order="tp-cp-ep-dp-pp"
    )
    for name, field in (("tp", "etp"), ("ep", "ep"), ("dp", "edp")):
        for ranks in generator.get_ranks(name):
            places = [grid.expert_coords(rank) for rank in ranks]
            assert [getattr(place, field) for place in places] == list(range(len(ranks)))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_rank_is_found_by_its_coordinates(grid):
    assert [grid.rank(grid.coords(rank)) for rank in range(grid.world_size)] == list(range(grid.world_size))
    assert grid.rank(Coords(0, 0, 0)) == 0


ROLES = [
    ParallelLayout(3, rollout_ranks=1),
    ParallelLayout(4, tp=2, rollout_tp=2, rollout_ranks=2),
    ParallelLayout(14, tp=2, pp=2, ep=2, etp=1, rollout_tp=3, rollout_ranks=6),
]


@pytest.mark.parametrize("grid", ROLES, ids=str)
def test_ranks_that_train_stand_as_in_a_job_of_their_own_and_replicas_are_of_the_last_ones(grid):
    alone = replace(grid, world_size=grid.world_size - grid.rollout_ranks, rollout_ranks=0)
    assert [*grid.trainers, *grid.samplers] == list(range(grid.world_size))
    assert grid.dp == alone.dp
    for rank in grid.trainers:
        assert (grid.coords(rank), grid.expert_coords(rank)) == (alone.coords(rank), alone.expert_coords(rank))
    assert [(grid.replica(rank), grid.rollout_rank(rank)) for rank in grid.samplers] == [
        (replica, place) for replica in range(grid.num_replicas) for place in range(grid.rollout_size)
    ]
    assert grid.min_world_size <= grid.world_size
    assert replace(grid, world_size=grid.min_world_size).dp >= 1


def test_without_roles_every_rank_does_both():
    grid = ParallelLayout(4, tp=2)
    assert list(grid.trainers) == list(grid.samplers) == list(range(4))
