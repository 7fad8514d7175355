"""Sums and rates between real ranks; a rank that gives the wrong numbers is found."""

import itertools

import pytest
import torch

from mrl.commands.doctor import collectives
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def told(findings):
    ((level, found),) = [(each.level, each.found) for each in findings]
    return level, found


def wrong_sums(lying):
    """Rank 1 takes itself for another one where `lying`."""
    rank = torch.distributed.get_rank()
    return collectives.wrong_sums(CPU, 5 if lying and rank == 1 else rank, 2)


def test_sums_of_real_ranks_are_exact():
    level, found = told(collectives.check_sums(run_ranks(2, wrong_sums, False)))
    assert (level, found) == ("ok", "exact on 2 ranks: int64 on cpu, float32 on cpu, bfloat16 on cpu")


def test_a_rank_that_gives_other_numbers_is_found():
    level, found = told(collectives.check_sums(run_ranks(2, wrong_sums, True)))
    assert level == "problem" and found == "wrong on rank(s) 0-1: 4099 of 4099 sums of int64 on cpu on rank 0"


@pytest.mark.parametrize("dtype", collectives.DTYPES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 300, 4096])
def test_sums_are_exact_in_any_order(dtype, world_size):
    """Every partial sum is an integer that the dtype holds: none is larger than the whole, which it holds."""
    largest = {torch.int64: 2**53, torch.float32: 2**24, torch.bfloat16: collectives.BF16_EXACT}[dtype]
    total = sum(collectives.addend(rank, world_size, dtype, 600) for rank in range(world_size))
    assert int(total.max()) <= largest and int(total.min()) >= 0


def test_every_pair_meets_once_and_nobody_twice_in_a_round():
    for count in range(1, 9):
        members = list(range(10, 10 + count))
        found = collectives.rounds(members)
        assert sorted(tuple(sorted(pair)) for each in found for pair in each) == list(
            itertools.combinations(members, 2)
        )
        for each in found:
            assert len({rank for pair in each for rank in pair}) == 2 * len(each)
    assert len(collectives.rounds(range(512))) == collectives.MAX_ROUNDS


def test_hosts_are_measured_by_their_first_ranks():
    plan = collectives.schedule_pairs({"a": [0, 1], "b": [2, 3], "c": [4]})
    assert plan[0] == [(0, 1), (2, 3)]
    assert {tuple(sorted(pair)) for each in plan[1:] for pair in each} == {(0, 2), (0, 4), (2, 4)}


def rates(plan):
    rank = torch.distributed.get_rank()
    return collectives.time_all_reduces(CPU), collectives.pair_rates(plan, rank, CPU)


def test_rates_of_real_ranks():
    found = run_ranks(2, rates, [[(0, 1)]])
    assert all(0 < seconds < 10 for seconds in found[0][0])
    assert found[0][1]["0-1"] > 1e6 and found[1][1] == {}
    assert told(collectives.check_all_reduce_rate(found[0][0], 2, 1, "cpu"))[0] == "ok"


def test_gpus_over_slow_sockets_are_told():
    seconds = [1e-4, 1e-3, 20e-3]
    assert told(collectives.check_all_reduce_rate(seconds, 16, 2, "cuda"))[0] == "warning"
    assert told(collectives.check_all_reduce_rate(seconds, 16, 1, "cuda"))[0] == "ok"
    assert told(collectives.check_all_reduce_rate([1e-5, 1e-4, 1e-3], 16, 2, "cuda"))[0] == "ok"


def test_the_host_that_all_slow_pairs_share_is_named():
    hosts = {"a": [0], "b": [1], "c": [2], "d": [3], "e": [4], "f": [5]}
    pairs = {f"{a}-{b}": 1e9 if 3 in (a, b) else 9e9 for a, b in itertools.combinations(range(6), 2)}
    level, found = told(collectives.check_pairs(pairs, hosts))
    assert level == "warning" and "slowest a and d: 1" in found and "(5 are that slow, all with d)" in found
    assert told(collectives.check_pairs(dict.fromkeys(pairs, 9e9), hosts))[0] == "ok"


def test_a_slow_way_inside_a_host_is_told_apart():
    hosts = {"a": [0, 1, 2, 3], "b": [4]}
    inside = {"0-1": 9e9, "2-3": 9e9, "0-2": 9e9, "1-3": 1e9}
    first, second = collectives.check_pairs({**inside, "0-4": 1e9}, hosts)
    assert first.level == "warning" and "slowest 1-3 on a" in first.found
    assert second.level == "ok" and "between hosts" in second.found
