"""Megatron's groups are the grid's, again and again in one process."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mrl.distributed.subset_groups import use_as_world
from mrl.megatron import parallel_state as parallel
from mrl.parallel_layout import Coords, ParallelLayout
from tests.ranks import run_ranks

GRIDS = [
    ParallelLayout(4, tp=2, pp=2),
    ParallelLayout(4, tp=4, rollout_tp=2),
    ParallelLayout(4, pp=2, vpp=2, rollout_tp=4),
    ParallelLayout(4, pp=4),
    ParallelLayout(4),
]


def groups_of(grid):
    groups = parallel.initialize(grid, seed=1)
    named = {name: dist.get_process_group_ranks(getattr(groups, name)) for name in ("tp", "dp", "pp", "rollout_tp")}
    return groups.coords, named


def test_groups_follow_the_grid_however_often_it_changes():
    for grid in [*GRIDS, GRIDS[0]]:
        for rank, (coords, found) in enumerate(run_ranks(4, groups_of, grid)):
            assert coords == grid.coords(rank)
            tp, dp, pp = coords.tp, coords.dp, coords.pp
            assert found["tp"] == [grid.rank(Coords(other, dp, pp)) for other in range(grid.tp)]
            assert found["dp"] == [grid.rank(Coords(tp, other, pp)) for other in range(grid.dp)]
            assert found["pp"] == [grid.rank(Coords(tp, dp, other)) for other in range(grid.pp)]
            start = grid.replica(rank) * grid.rollout_tp
            assert found["rollout_tp"] == list(range(start, start + grid.rollout_tp))


def wrong_size():
    with pytest.raises(RuntimeError, match="the job has 1 ranks, the grid 2"):
        parallel.initialize(ParallelLayout(2), seed=0)


def test_a_grid_of_another_size_is_refused():
    run_ranks(1, wrong_size)


MIXTURES = [
    ParallelLayout(4, tp=2, ep=2),
    ParallelLayout(4, tp=2, ep=4, etp=1),
    ParallelLayout(4, tp=2, pp=2, ep=2, etp=1),
    ParallelLayout(4, ep=2),
]


def expert_groups(grid):
    from megatron.core import parallel_state

    parallel.initialize(grid, seed=1)
    groups = (
        parallel_state.get_expert_tensor_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_expert_data_parallel_group(),
    )
    return [dist.get_process_group_ranks(group) for group in groups]


@pytest.mark.parametrize("grid", MIXTURES, ids=str)
def test_expert_groups_follow_the_grid(grid):
    stage = grid.world_size // grid.pp
    for rank, found in enumerate(run_ranks(4, expert_groups, grid)):
        own = grid.expert_coords(rank)
        peers = [
            (other, grid.expert_coords(other)) for other in range(grid.world_size) if other // stage == rank // stage
        ]
        assert found == [
            [other for other, place in peers if (place.ep, place.edp) == (own.ep, own.edp)],
            [other for other, place in peers if (place.etp, place.edp) == (own.etp, own.edp)],
            [other for other, place in peers if (place.etp, place.ep) == (own.etp, own.ep)],
        ]


def timeouts(timeout_s):
    groups = parallel.initialize(ParallelLayout(2), seed=1, timeout_s=timeout_s)
    found = groups.dp._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    parallel.destroy()
    return found


@pytest.mark.parametrize("timeout_s", [42, 630, 660])
def test_a_group_waits_for_longer_than_was_asked_for(timeout_s):
    """The watchdog's alarm comes first: torch's own end of a collective names nobody."""
    for found in run_ranks(2, timeouts, timeout_s):
        assert timeout_s + 60 <= found <= timeout_s + 200


ROLES = [
    ParallelLayout(4, tp=2, rollout_ranks=2),
    ParallelLayout(4, rollout_tp=2, rollout_ranks=2),
    ParallelLayout(4, pp=3, rollout_ranks=1),
]


def roles_of(grid):
    groups = parallel.initialize(grid, seed=1)
    names = ("tp", "cp", "dp", "pp", "rollout_tp")
    named = {name: dist.get_process_group_ranks(getattr(groups, name)) for name in names}
    whole = None
    if groups.is_trainer:
        with groups.trainers_as_world():
            total = torch.tensor(1)
            dist.all_reduce(total)
            whole = (dist.get_rank(), dist.get_world_size(), int(total))
    total = torch.tensor(1)
    dist.all_reduce(total)
    assert (dist.get_world_size(), int(total)) == (4, 4)
    return groups.is_trainer, groups.is_sampler, groups.is_replica_leader, named, whole


def test_ranks_that_only_sample_have_no_part_in_megatron_and_the_others_are_its_whole_world():
    for grid in [*ROLES, *GRIDS[:1], ROLES[0]]:  # groups that only some ranks made do not get in the way of later ones
        found = run_ranks(4, roles_of, grid)
        num_trainers = len(grid.trainers)
        for rank, (trains, samples, leads, named, whole) in enumerate(found):
            assert (trains, samples) == (rank in grid.trainers, rank in grid.samplers)
            assert whole == ((rank, num_trainers, num_trainers) if trains else None)
            if trains:
                coords = grid.coords(rank)
                for name in ("tp", "dp", "pp"):
                    peers = [grid.rank(replace(coords, **{name: i})) for i in range(getattr(grid, name))]
                    assert named[name] == peers
            else:
                assert all(named[name] == [rank] for name in ("tp", "cp", "dp", "pp"))
            if samples:
                start = rank - grid.rollout_rank(rank)
                assert named["rollout_tp"] == list(range(start, start + grid.rollout_tp))
                assert leads == (rank == start)
            else:
                assert (named["rollout_tp"], leads) == ([rank], False)


def not_first():
    group = dist.new_group([1])
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match=r"ranks \[1\] are not the first ones"), use_as_world(group):
            pass
        assert dist.get_world_size() == 2
        dist.destroy_process_group(group)


def test_only_the_first_ranks_stand_for_the_job():
    run_ranks(2, not_first)
