import random

import pytest

from mrl.data.packing import balance, balance_families, pack_microbatches

BEST_FIT_BOUND = 11 / 9  # Johnson 1974: best fit decreasing needs at most this times the fewest bins (and 4)
LPT_BOUND = 4 / 3  # Graham 1969: longest processing time first is within 4/3 of the best


def random_lens(seed, count, largest):
    generator = random.Random(seed)
    return [generator.randint(1, largest) for _ in range(count)]


def flat(bins):
    return sorted(index for members in bins for index in members)


def test_balance_golden():
    # Largest first: 9 | 5 | 4, then 3 to the lightest (4), 1 to the lightest (5).
    assert balance([5, 3, 9, 1, 4], 3) == [[2], [0, 3], [1, 4]]


@pytest.mark.parametrize("seed", range(20))
def test_balance_is_a_partition_near_the_mean(seed):
    costs = random_lens(seed, count=random.Random(seed).randint(5, 200), largest=1000)
    bins = balance(costs, 5)
    assert flat(bins) == list(range(len(costs)))
    assert all(bins)
    lower_bound = max(sum(costs) / 5, max(costs))
    assert max(sum(costs[index] for index in members) for members in bins) <= LPT_BOUND * lower_bound


def test_balance_fills_every_bin_even_with_items_that_cost_nothing():
    assert all(balance([0, 0, 7, 0], 4))
    assert sum(bool(members) for members in balance([3, 2], 4)) == 2


@pytest.mark.parametrize("seed", range(12))
def test_families_stay_together_unless_that_costs(seed):
    """The largest bin is no larger than that of whole families."""
    chance = random.Random(seed)
    families, prompts, responses = [], [], []
    for size in (chance.randint(1, 6) for _ in range(chance.randint(1, 12))):
        families.append(list(range(len(prompts), len(prompts) + size)))
        prompts += [chance.choice([1, 50])] * size
        responses += [chance.randint(1, 40) for _ in range(size)]

    def load(bins):
        return max(
            sum(prompts[family[0]] for family in families if set(family) & set(members))
            + sum(responses[item] for item in members)
            for members in bins
        )

    bins = balance_families(families, prompts, responses, 4)
    assert flat(bins) == list(range(len(prompts)))
    costs = [prompts[family[0]] + sum(responses[item] for item in family) for family in families]
    whole = [[item for index in members for item in families[index]] for members in balance(costs, 4)]
    assert load(bins) <= load(whole)
    if len(families) == 1:
        assert sum(map(bool, bins)) == min(4, len(prompts))


def test_four_prompts_of_equal_samples_have_a_bin_each():
    families = [[3 * family + item for item in range(3)] for family in range(4)]
    assert sorted(balance_families(families, [9] * 12, [5] * 12, 4)) == families
    assert balance_families([[0, 1, 2, 3]], [9] * 4, [5] * 4, 2) in ([[0, 1], [2, 3]], [[2, 3], [0, 1]])


def test_balance_refuses_nonsense():
    with pytest.raises(ValueError, match=r"num_bins is 0"):
        balance([1], 0)
    with pytest.raises(ValueError, match=r"-1"):
        balance([1, -1], 2)


@pytest.mark.parametrize("seed", range(20))
def test_microbatches_partition_the_sequences_within_the_budget(seed):
    lens = random_lens(seed, count=100, largest=300)
    packed = pack_microbatches(lens, 1000)
    assert flat(packed) == list(range(100))
    totals = [sum(lens[index] for index in members) for members in packed]
    assert max(totals) <= 1000
    assert len(packed) <= -(-sum(lens) // 1000) + 1
    assert min(totals) >= max(totals) - max(lens)  # no tiny last one


def test_packing_ignores_nothing_about_order_and_is_deterministic():
    lens = random_lens(3, count=50, largest=90)
    packed = pack_microbatches(lens, 256)
    assert packed == pack_microbatches(list(lens), 256)
    assert all(members == sorted(members) for members in packed)
    assert [members[0] for members in packed] == sorted(members[0] for members in packed)


def test_a_sequence_beyond_the_budget_is_alone():
    packed = pack_microbatches([3, 50, 4, 2], 10)
    assert [1] in packed
    assert flat(packed) == [0, 1, 2, 3]
    assert len(packed) == 2


def test_everything_fits_into_one_and_nothing_into_none():
    assert pack_microbatches([1, 2, 3], 6) == [[0, 1, 2]]
    assert pack_microbatches([], 6) == []
    assert pack_microbatches([9, 9], 6) == [[0], [1]]


def test_the_count_can_be_raised_for_other_ranks_and_for_interleaving():
    lens = [4, 4, 4, 4, 4]
    assert len(pack_microbatches(lens, 8)) == 3
    assert len(pack_microbatches(lens, 8, at_least=4)) == 4
    assert len(pack_microbatches(lens, 8, multiple_of=4)) == 4
    assert all(pack_microbatches(lens, 8, multiple_of=4))
    assert pack_microbatches([4], 8, multiple_of=2) == [[0], []]
    assert pack_microbatches([], 8, at_least=2) == [[], []]


def test_packing_refuses_nonsense():
    with pytest.raises(ValueError, match=r"max_tokens=0"):
        pack_microbatches([1], 0)
    with pytest.raises(ValueError, match=r"0 tokens"):
        pack_microbatches([1, 0], 5)


@pytest.mark.parametrize("count", [820, 1024, 1500])
def test_sizes_that_do_not_balance_still_pack_tightly(count):
    # Three short sequences fill the budget, so do two of most others: equal bins would need one for each pair.
    lens = [4000 + index % 5000 for index in range(2048)]
    packed = pack_microbatches(lens, 16384, at_least=count, multiple_of=4)
    assert flat(packed) == list(range(2048))
    assert max(sum(lens[index] for index in members) for members in packed) <= 16384
    assert len(packed) % 4 == 0
    assert count <= len(packed) <= max(count + 3, BEST_FIT_BOUND * sum(lens) / 16384)
