"""The sampling contract: what is kept, that random numbers are uniform and keyed, that drawing follows the weights."""

import math

import pytest
import torch

from mrl.algorithms.functional.sampling import BLOCK, CANDIDATES, draw, keep_threshold, stream_key, uniforms

NUM_DRAWS = 40_000
CHI_SQUARE_999 = {3: 16.27, 19: 43.82, 99: 148.23}
"""99.9 % quantiles by degrees of freedom: a right sampler exceeds one in a thousand fixed seeds."""


def kept(logits, top_k=-1, top_p=1.0, min_p=0.0):
    """Indices kept in each row."""
    threshold = keep_threshold(logits, top_k, top_p, min_p)
    return [row.nonzero().flatten().tolist() for row in logits >= threshold[:, None]]


def logits_of(*rows):
    return torch.tensor(rows).log()


def test_nothing_to_truncate_gives_no_threshold():
    logits = torch.randn(2, 9)
    assert keep_threshold(logits, -1, 1.0, 0.0) is None
    assert keep_threshold(logits, 9, 1.0, 0.0) is None


def test_top_k_keeps_the_k_largest():
    assert kept(logits_of([0.1, 0.4, 0.2, 0.3]), top_k=2) == [[1, 3]]
    assert kept(logits_of([0.1, 0.4, 0.2, 0.3]), top_k=1) == [[1]]


def test_top_p_keeps_the_fewest_that_reach_the_sum():
    row = [0.1, 0.4, 0.2, 0.3]
    assert kept(logits_of(row), top_p=0.39) == [[1]]
    assert kept(logits_of(row), top_p=0.41) == [[1, 3]]
    assert kept(logits_of(row), top_p=0.71) == [[1, 2, 3]]
    assert kept(logits_of(row), top_p=0.95) == [[0, 1, 2, 3]]


def test_top_p_counts_what_top_k_left():
    # of 0.4 and 0.3 the first has 0.571: enough for 0.55 after top_k, not before
    assert kept(logits_of([0.1, 0.4, 0.2, 0.3]), top_k=2, top_p=0.55) == [[1]]
    assert kept(logits_of([0.1, 0.4, 0.2, 0.3]), top_p=0.55) == [[1, 3]]


def test_min_p_keeps_a_fraction_of_the_most_likely():
    assert kept(logits_of([0.1, 0.4, 0.2, 0.3]), min_p=0.49) == [[1, 2, 3]]
    assert kept(logits_of([0.1, 0.4, 0.2, 0.3]), min_p=0.51) == [[1, 3]]
    assert kept(logits_of([0.1, 0.4, 0.2, 0.3]), top_k=3, top_p=0.9, min_p=0.7) == [[1, 3]]


def test_rows_are_cut_each_for_itself():
    rows = [[0.7, 0.2, 0.05, 0.05], [0.25, 0.26, 0.24, 0.25]]
    together = keep_threshold(logits_of(*rows), -1, 0.6, 0.0)
    alone = torch.cat([keep_threshold(logits_of(row), -1, 0.6, 0.0) for row in rows])
    assert torch.equal(together, alone)


def test_top_p_over_a_flat_row_looks_beyond_the_candidates():
    logits = torch.zeros(1, 4 * CANDIDATES) - torch.arange(4 * CANDIDATES) * 1e-4
    probs = logits.softmax(1)
    num_kept = len(kept(logits, top_p=0.8)[0])
    assert num_kept > CANDIDATES
    assert probs[0, : num_kept - 1].sum() < 0.8 <= probs[0, :num_kept].sum() + 1e-5


def test_uniforms_lie_in_the_unit_interval_and_fill_it_evenly():
    keys = torch.tensor([stream_key(3, 17, 0)]).expand(NUM_DRAWS)
    values = uniforms(keys, torch.arange(NUM_DRAWS))
    assert values.min() >= 0 and values.max() < 1
    counts = torch.histc(values.float(), bins=20, min=0, max=1)
    assert ((counts - NUM_DRAWS / 20) ** 2 / (NUM_DRAWS / 20)).sum() < CHI_SQUARE_999[19]


@pytest.mark.parametrize("varied", ["seed", "uid", "sample_index", "position"])
def test_neighbouring_keys_and_positions_are_independent(varied):
    """Pairs (u of i, u of i + 1) fill the 10 x 10 squares evenly."""
    count = NUM_DRAWS // 2
    base = {"seed": 5, "uid": 7, "sample_index": 1}
    if varied == "position":
        keys, positions = torch.tensor([stream_key(**base)]).expand(count + 1), torch.arange(count + 1)
    else:
        keys = torch.tensor([stream_key(**{**base, varied: i}) for i in range(count + 1)])
        positions = torch.full((count + 1,), 4)
    values = uniforms(keys, positions)
    cells = (values[:-1] * 10).long() * 10 + (values[1:] * 10).long()
    counts = torch.bincount(cells, minlength=100).double()
    assert ((counts - count / 100) ** 2 / (count / 100)).sum() < CHI_SQUARE_999[99]


def test_swapped_parts_of_the_key_give_another_stream():
    keys = {stream_key(*parts) for parts in [(1, 2, 3), (1, 3, 2), (2, 1, 3), (3, 2, 1), (0, 0, 0), (-1, 0, 0)]}
    assert len(keys) == 6
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_uniforms_are_these_numbers():
    """Frozen: another stream would change what a resumed run samples."""
    values = uniforms(torch.tensor([stream_key(0, 0, 0), stream_key(1, 2, 3)]), torch.tensor([0, 5]))
    assert values.tolist() == [0.1296456182997474, 0.9878582133653551]


def test_draw_follows_the_weights():
    weights = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.25]).repeat(NUM_DRAWS, 1)
    values = uniforms(torch.tensor([stream_key(1, 1, 1)]).expand(NUM_DRAWS), torch.arange(NUM_DRAWS))
    counts = torch.bincount(draw(weights, values), minlength=5)
    assert counts[1] == 0
    expected = weights[0] * NUM_DRAWS
    positive = expected > 0
    assert ((counts[positive] - expected[positive]) ** 2 / expected[positive]).sum() < CHI_SQUARE_999[3]


def test_draw_is_the_inverse_of_the_cumulative_sum():
    size = 3 * BLOCK + 7
    weights = torch.rand(5, size, generator=torch.Generator().manual_seed(0))
    cumulative = weights.double().cumsum(1) / weights.double().sum(1, keepdim=True)
    uniform = torch.tensor([0.0, 0.2, 0.5, 0.9, 0.9999], dtype=torch.float64)
    expected = torch.searchsorted(cumulative, uniform[:, None], right=True).squeeze(1)
    assert torch.equal(draw(weights, uniform), expected)


@pytest.mark.parametrize("size", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 3])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_a_token_of_weight_zero_is_never_drawn(size, uniform):
    for only in {0, size // 2, size - 1}:
        weights = torch.zeros(1, size)
        weights[0, only] = 1e-30
        assert draw(weights, torch.tensor([uniform], dtype=torch.float64)).item() == only


def test_the_end_of_a_block_is_never_passed():
    """Block sums are fp32, the sum inside a block is fp64: the rest to find may lie beyond it."""
    weights = torch.rand(200, 2 * BLOCK, generator=torch.Generator().manual_seed(0))
    weights[:, BLOCK - 50 :] = 0.0
    tokens = draw(weights, torch.full((200,), 1 - 2.0**-53, dtype=torch.float64))
    assert torch.equal(tokens, torch.full((200,), BLOCK - 51))


def test_a_row_without_numbers_draws_some_valid_index():
    for value in (math.nan, math.inf):
        token = draw(torch.full((2, BLOCK + 5), value), torch.tensor([0.1, 0.9], dtype=torch.float64))
        assert (token >= 0).all() and (token < BLOCK + 5).all()
