from collections import Counter

import pytest

from mrl.data.shuffle import Shuffle

CHI_SQUARE_23_DF = 49.7  # 0.001 quantile: a fair shuffle exceeds it once in a thousand keys
GOLDEN_ORDER = [8, 5, 0, 2, 6, 4, 1, 9, 7, 3]  # of version 0.1.0; a resume depends on it


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_is_a_permutation(size):
    order = Shuffle(size, 7, 0)
    assert sorted(order(index) for index in range(size)) == list(range(size))


def test_golden_order_never_changes():
    assert [Shuffle(10, 0, 0)(index) for index in range(10)] == GOLDEN_ORDER


def test_each_key_gives_another_order():
    orders = {
        tuple(Shuffle(100, seed, epoch)(index) for index in range(100)) for seed in range(5) for epoch in range(5)
    }
    assert len(orders) == 25


def test_all_orders_of_four_are_equally_likely():
    counts = Counter(tuple(Shuffle(4, 11, epoch)(index) for index in range(4)) for epoch in range(4800))
    assert len(counts) == 24
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < CHI_SQUARE_23_DF


def test_a_huge_range_costs_nothing():
    order = Shuffle(10**15, 1)
    assert len({order(index) for index in range(100)}) == 100


def test_refuses_what_is_outside():
    with pytest.raises(ValueError, match=r"size is 0"):
        Shuffle(0, 1)
    with pytest.raises(IndexError, match=r"5"):
        Shuffle(5, 1)(5)
