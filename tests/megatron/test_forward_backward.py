"""Microbatches: every sequence once, within the budget, as many on each data-parallel rank, common beginnings once."""

import pytest
import torch

from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import ARCHS, LAYOUTS, make_batch, make_policy
from tests.ranks import run_ranks

BUDGET = 40
FOUR = {**LAYOUTS, "dp2_pp2_vpp2": ParallelLayout(4, pp=2, vpp=2)}


def cut(grid, shares):
    """(rows, tokens, positions, rows scored, tokens scored) of each microbatch of this rank's share of the batch."""
    policy = make_policy(ARCHS["qwen2"], grid, seed=None, actor={"max_tokens_per_microbatch": BUDGET})
    batch = make_batch(20)
    part = batch.select(shares[policy._groups.coords.dp])
    return [
        (micro.rows, micro.tokens[0], micro.positions[0], micro.targets.rows_R, micro.targets.tokens_R)
        for micro in policy._forward_backward.microbatches(part, policy._full_distribution)
    ]


def sequences(batch):
    return list(zip(batch.tokens_P.split(batch.seq_lens_B.tolist()), batch.prompt_lens_B.tolist(), strict=True))


def test_each_response_token_is_scored_at_the_position_before_it():
    everything = list(range(20))
    micros = run_ranks(1, cut, ParallelLayout(1), [everything])[0]
    assert sorted(row for rows, *_ in micros for row in rows) == everything
    known = sequences(make_batch(20))
    for rows, tokens, positions, rows_R, tokens_R in micros:
        assert tokens.numel() <= BUDGET
        expected = [(index, token) for row in rows for index, token in _responses(*known[row])]
        found = list(zip((positions[rows_R] + 1).tolist(), tokens_R.tolist(), strict=True))
        assert found == expected


def _responses(tokens, prompt_len):
    return [(index, int(tokens[index])) for index in range(prompt_len, len(tokens))]


def test_what_sequences_begin_with_alike_is_packed_once_and_last_tokens_never():
    micros = run_ranks(1, cut, ParallelLayout(1), [list(range(20))])[0]
    known = sequences(make_batch(20))
    for rows, tokens, *_ in micros:
        distinct = {tuple(known[row][0][: end + 1].tolist()) for row in rows for end in range(len(known[row][0]) - 1)}
        assert tokens.numel() == len(distinct)
    assert sum(tokens.numel() for _, tokens, *_ in micros) < sum(len(tokens) - 1 for tokens, _ in known)


@pytest.mark.parametrize(
    ("layout", "shares"),
    [
        ("dp2", [list(range(3)), list(range(3, 20))]),
        ("dp2", [[], list(range(20))]),
        ("dp2", [[], []]),
        ("pp2_vpp2", [list(range(2))]),
        ("dp2_pp2_vpp2", [[0], list(range(1, 20))]),
    ],
    ids=str,
)
def test_all_ranks_have_as_many_microbatches_as_the_schedule_can_use(layout, shares):
    grid = FOUR[layout]
    found = run_ranks(grid.world_size, cut, grid, shares)
    counts = {len(micros) for micros in found}
    assert len(counts) == 1
    assert counts.pop() % (grid.pp if grid.vpp > 1 else 1) == 0
    for rank, micros in enumerate(found):
        assert sorted(row for rows, *_ in micros for row in rows) == list(range(len(shares[grid.coords(rank).dp])))
        for rows, tokens, _, rows_R, _ in micros:
            assert tokens.numel() >= 1
            assert rows or not rows_R.numel()


def test_sequence_parallel_ranks_can_share_the_packed_length():
    for micros in run_ranks(2, cut, LAYOUTS["tp2"], [list(range(20))]):
        assert all(tokens.numel() % 2 == 0 for _, tokens, *_ in micros)


def reported(grid):
    policy = make_policy(ARCHS["qwen2"], grid)
    micros = policy._forward_backward.microbatches(make_batch(10), policy._full_distribution)
    with torch.no_grad():
        reports = policy._forward_backward.run(
            micros, lambda logprobs, entropy, micro: (logprobs.sum(), {"rows": micro.rewards_B}), backward=False
        )
    return [report["rows"].numel() for report in reports], [len(micro.rows) for micro in micros]


@pytest.mark.parametrize("layout", ["single", "pp2", "pp2_vpp2"])
def test_reports_come_from_the_last_stage_in_the_order_of_the_microbatches(layout):
    grid = LAYOUTS[layout]
    for rank, (found, expected) in enumerate(run_ranks(grid.world_size, reported, grid)):
        assert found == (expected if grid.coords(rank).pp == grid.pp - 1 else [])
