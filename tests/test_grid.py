"""The order of ranks is Megatron's."""

import pytest

from mrl.grid import Coords, Grid
from mrl.megatron.parallel import parallel_state

GRIDS = [
    Grid(8, tp=2, pp=2),
    Grid(16, tp=2, cp=2, pp=2),
    Grid(16, tp=2, pp=2, ep=4, etp=1),
    Grid(16, tp=4, cp=2, ep=2, etp=2),
    Grid(32, tp=2, cp=2, pp=2, ep=4),
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
