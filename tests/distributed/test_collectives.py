"""Ragged exchanges and joint errors, over real gloo ranks."""

import random

import pytest
import torch
import torch.distributed as dist

from mrl.distributed.collectives import (
    all_gather_ragged,
    all_reduce_sum,
    call_on_first_rank,
    raise_error_on_all_ranks,
    sum_in_rank_order,
)
from mrl.errors import UserError
from tests.ranks import RankError, run_ranks


def _gather():
    rank = dist.get_rank()
    return all_gather_ragged(torch.full((rank, 2), float(rank)), dist.group.WORLD).tolist()


def test_all_gather_ragged_keeps_rank_order_and_takes_empty_parts():
    expected = [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0], [3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    assert run_ranks(4, _gather) == [expected] * 4


def _gather_any(seed):
    """Rows of any numbers, none at all too, out of a tensor that is not contiguous; the answer is a copy."""
    draw, size, rank = random.Random(seed), dist.get_world_size(), dist.get_rank()
    for _ in range(30):
        counts = [draw.choice((0, 0, 0, 1, 3)) for _ in range(size)]
        matrix = 10 * rank + torch.arange(2 * counts[rank]).view(2, counts[rank]).t()
        found = all_gather_ragged(matrix, dist.group.WORLD)
        parts = [10 * one + torch.arange(2 * count).view(2, count).t() for one, count in enumerate(counts)]
        assert torch.equal(found, torch.cat(parts)) and found.dtype == matrix.dtype
        found += 1
        assert torch.equal(matrix, parts[rank])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_gather_ragged_gives_what_was_put_in_for_any_numbers_of_rows(ranks):
    run_ranks(ranks, _gather_any, 7)


def _sum_transposed():
    matrix = torch.arange(6.0).view(2, 3).t()  # not contiguous: gloo alone would move the wrong bytes
    return all_reduce_sum(matrix, dist.group.WORLD).tolist(), matrix.tolist()


def test_sum_over_is_right_for_non_contiguous_input_and_leaves_it_alone():
    for total, kept in run_ranks(4, _sum_transposed):
        assert total == [[0.0, 12.0], [4.0, 16.0], [8.0, 20.0]]
        assert kept == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def _sum_in_order(columns):
    parts = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    own = parts[dist.get_rank()]
    one = parts.float()
    return sum_in_rank_order(own[:, columns], dist.group.WORLD), (((one[0] + one[1]) + one[2]) + one[3]).bfloat16()


def test_a_sum_in_rank_order_has_the_same_bits_on_all_ranks_and_in_any_part():
    for columns in (slice(None), slice(7, 8), slice(3, 40, 3)):
        for total, expected in run_ranks(4, _sum_in_order, columns):
            assert torch.equal(total, expected[:, columns])


def _raise(user):
    rank = dist.get_rank()
    error = None
    if rank in (2, 3):
        error = UserError(f"file of rank {rank}") if user else KeyError(f"rank {rank}")
    try:
        raise_error_on_all_ranks(error)
    except (UserError, RuntimeError) as raised:
        return type(raised).__name__, str(raised), getattr(raised, "on_all_ranks", None)


def test_all_ranks_raise_the_first_failing_ranks_user_error():
    assert run_ranks(4, _raise, True) == [("UserError", "file of rank 2", True)] * 4


def test_other_errors_name_the_rank():
    assert run_ranks(4, _raise, False) == [("RankFailedError", "rank 2 failed: KeyError: 'rank 2'", None)] * 4


def _fail_on_last():
    if dist.get_rank() == 3:
        raise ValueError("only here")


def test_the_rank_pool_reports_a_failing_rank_and_recovers():
    with pytest.raises(RankError, match="only here"):
        run_ranks(4, _fail_on_last)
    assert len(run_ranks(4, _gather)) == 4


def _called(members, fails):
    group, calls = dist.new_group(members), []
    if dist.get_rank() not in members:
        return None

    def once():
        calls.append(dist.get_rank())
        if fails:
            raise UserError("no")
        return bytes([dist.get_rank()])

    try:
        return call_on_first_rank(group, once), calls
    except UserError as error:
        return str(error), calls


@pytest.mark.parametrize("fails", [False, True])
def test_a_function_is_called_on_the_first_rank_of_a_group_alone(fails):
    result = "no" if fails else bytes([1])
    assert run_ranks(3, _called, [1, 2], fails) == [None, (result, [1]), (result, [])]
