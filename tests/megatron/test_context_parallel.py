"""Context parallelism: the same numbers as on one rank, and which tokens a rank has."""

import pytest
import torch

from mrl.data.shared_prefix import each_token
from mrl.megatron.context_parallel import own_rows, own_rows_by_sequence
from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import ARCHS, CONTEXT_LAYOUTS, MIXTURES, make_batch, make_policy, scores, train
from tests.ranks import run_ranks

PARITY = 1e-4  # the bound; measured below 1e-5
STEPS = 3
MIXED = {"cp2_ep2": ParallelLayout(2, cp=2, ep=2), "cp2_tp2_ep2": ParallelLayout(4, tp=2, cp=2, ep=2, etp=1)}
CASES = [
    *((layout, grid, "qwen3") for layout, grid in CONTEXT_LAYOUTS.items()),
    *((layout, CONTEXT_LAYOUTS[layout], "qwen3_windows") for layout in ("cp2", "cp2_pp2")),
    *((layout, grid, "qwen3_moe") for layout, grid in MIXED.items()),
]


def arch_of(name):
    return {**ARCHS, **MIXTURES}[name]


def scored_and_trained(grid, name):
    policy = make_policy(arch_of(name), grid)
    return scores(policy, make_batch()), train(policy, STEPS)


@pytest.fixture(scope="module")
def alone():
    return {name: run_ranks(1, scored_and_trained, ParallelLayout(1), name)[0] for name in {name for *_, name in CASES}}


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "grid", "name"), CASES, ids=[f"{layout}-{name}" for layout, _, name in CASES])
def test_scores_and_updates_are_those_of_one_rank(layout, grid, name, alone):
    expected, metrics = alone[name]
    for found, steps in run_ranks(grid.world_size, scored_and_trained, grid, name):
        torch.testing.assert_close(found, expected, rtol=0, atol=PARITY)
        for ours, theirs in zip(steps, metrics, strict=True):
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                assert ours[key] == pytest.approx(value, rel=PARITY, abs=1e-6), key


def test_ranks_share_the_tokens_and_the_cost():
    parts = [own_rows(24, 3, rank).tolist() for rank in range(3)]
    assert parts[0] == [0, 1, 2, 3, 20, 21, 22, 23]
    assert sorted(token for part in parts for token in part) == list(range(24))
    assert len({sum(part) for part in parts}) == 1


def test_with_transformer_engine_each_sequence_is_cut_by_itself():
    assert own_rows_by_sequence([4, 8], 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
    assert own_rows_by_sequence([4, 8], 2, 1).tolist() == [1, 2, 6, 7, 8, 9]
    assert each_token(3).origin_D.tolist() == [0, 1, 2]
