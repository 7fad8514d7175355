"""Packed causal attention against one dense float64 attention per sequence."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.data.shared_prefix import SharedPrefixes, each_token, shared_prefixes
from mrl.megatron.attention import MAX_PADDING, SMALL_GROUP_TOKENS, CoreAttention, pack
from mrl.megatron.te_attention import pack_for_te

VALUE = 2e-6  # fp32 softmax and sums of at most 2,000 terms of order 1
GRADIENT = 2e-5  # sums of as many products; keys of long sequences collect the most

CPU = torch.device("cpu")
SHORT = [5, 9, 3, 7, 1, 9, 16, 2]
MIXED = [2100, 20, 2000, 1, 900]
"""Several groups, one of them with padding."""


def packed(lens, window=None):
    return pack(lens, each_token(sum(lens)), CPU, window=window)


def attention_with(window):
    """The second layer, which has the window; the first has none."""
    size = None if window is None else (window - 1, 0)
    return CoreAttention(
        SimpleNamespace(window_size=size, window_attn_skip_freq=[0, 1], softmax_type="vanilla"), 2, None, "self"
    )


def dense(query, key, value, lens, window=None):
    outputs = []
    group = query.size(2) // key.size(2)
    for q, k, v in zip(*(x.squeeze(1).split(lens) for x in (query, key, value)), strict=True):
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qnd,knd->nqk", q, k) / q.size(2) ** 0.5
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        hidden = ~(seen if window is None else seen.triu(1 - window))
        outputs.append(torch.einsum("nqk,knd->qnd", scores.masked_fill(hidden, -torch.inf).softmax(2), v))
    return torch.cat(outputs).flatten(1).unsqueeze(1)


@pytest.mark.parametrize(
    ("lens", "heads", "groups"),
    [(SHORT, 4, 2), (SHORT, 4, 4), (SHORT, 4, 1), (MIXED, 2, 1), ([40, 33, 12], 4, 2), ([1], 2, 2)],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 1, 6, 33, 1500])
def test_values_and_gradients_are_those_of_each_sequence_alone(lens, heads, groups, window):
    generator = torch.Generator().manual_seed(2)
    shapes = [(sum(lens), 1, count, 8) for count in (heads, groups, groups)]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    attention = attention_with(window)
    plan = packed(lens, window)
    found = attention(*inputs, None, packed_seq_params=plan)
    expected = dense(*exact, lens, window)
    torch.testing.assert_close(found, expected.float(), rtol=VALUE, atol=VALUE)
    grad = torch.randn(found.shape, generator=generator)
    found.backward(grad)
    expected.backward(grad.double())
    for ours, theirs in zip(inputs, exact, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad.float(), rtol=GRADIENT, atol=GRADIENT)


@pytest.mark.parametrize(
    "lens", [SHORT, MIXED, [7] * 40, [4096, 1], list(range(1, 300))], ids=lambda lens: str(len(lens))
)
def test_every_token_has_one_slot_and_groups_hold_little_padding(lens):
    plan = packed(lens)
    assert sum(group.size for group in plan.groups) == len(lens)
    assert plan.row_to_slot.unique().numel() == sum(lens)
    assert torch.equal(plan.query_slots[plan.row_to_slot], torch.arange(sum(lens)))
    start = 0
    for group in plan.groups:
        assert group.queries == group.keys and group.unseen is None
        slots = group.size * group.queries
        inside = (plan.row_to_slot >= start) & (plan.row_to_slot < start + slots)
        assert slots <= SMALL_GROUP_TOKENS or int(inside.sum()) >= (1 - MAX_PADDING) * slots
        start += slots
    assert start == plan.query_slots.numel()


SHARED = [
    # prompt, answers
    [(5, [3, 1, 7]), (9, [2, 2])],
    [(300, [20, 41, 33, 60]), (10, [90, 75])],
    [(1, [1, 1, 1]), (500, [40, 40, 40])],
]


@pytest.mark.parametrize("families", SHARED, ids=str)
@pytest.mark.parametrize("window", [None, 5, 64])
def test_shared_tokens_are_queries_once_unless_that_costs_more(families, window):
    """Short answers to long prompts see the prompt's keys; of long answers the prompt's queries come again."""
    generator = torch.Generator().manual_seed(4)
    ids = []
    for prompt, answers in families:
        begin = torch.randint(0, 50, (prompt,), generator=generator)
        ids += [torch.cat([begin, torch.randint(0, 50, (each,), generator=generator)]) for each in answers]
    lens = [len(each) for each in ids]
    prefixes = shared_prefixes(torch.cat(ids), lens)
    shapes = [(prefixes.origin_D.numel(), 1, count, 8) for count in (4, 2, 2)]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    plan = pack(lens, prefixes, CPU, window=window)
    scores = sum(group.size * group.queries * group.keys for group in plan.groups)
    assert scores < 0.8 * len(lens) * max(lens) ** 2
    found = attention_with(window)(*inputs, None, packed_seq_params=plan)
    expected = dense(*(x[prefixes.distinct_P] for x in exact), lens, window)[prefixes.origin_D]
    torch.testing.assert_close(found, expected.float(), rtol=VALUE, atol=VALUE)
    grad = torch.randn(found.shape, generator=generator)
    found.backward(grad)
    expected.backward(grad.double())
    for ours, theirs in zip(inputs, exact, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad.float(), rtol=GRADIENT, atol=GRADIENT)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_distinct_tokens_may_be_numbered_in_any_order(lens, random):
    """Rows lie in the order of the numbers; what is attended to is the same."""
    order = list(range(sum(lens)))
    random.shuffle(order)
    number_of, origin = torch.tensor(order), torch.tensor(order).argsort()
    generator = torch.Generator().manual_seed(sum(lens))
    inputs = [torch.randn(sum(lens), 1, count, 4, generator=generator) for count in (2, 1, 1)]
    attention = attention_with(None)
    laid = [rows[origin] for rows in inputs]
    found = attention(*laid, None, packed_seq_params=pack(lens, SharedPrefixes(number_of, origin), CPU))
    torch.testing.assert_close(found[number_of], dense(*inputs, lens), rtol=VALUE, atol=VALUE)


@pytest.mark.parametrize("lens", [[5000], [3000, 3000, 40]], ids=str)
def test_a_window_computes_few_scores_of_long_sequences(lens):
    plan = packed(lens, 100).windowed
    scores = sum(group.size * group.queries * group.keys for group in plan.groups)
    assert scores < 2.2 * 100 * sum(lens)
    assert max(group.unseen.numel() for group in plan.groups if group.unseen is not None) <= 100 * 199


def test_short_sequences_make_one_call():
    assert len(packed([15] * 100 + [9] * 100).groups) == 1


def test_transformer_engine_gets_plain_packed_sequences():
    plan = pack_for_te(SHORT, CPU)
    assert plan.qkv_format == "thd"
    assert plan.cu_seqlens_q.tolist() == [0, 5, 14, 17, 24, 25, 34, 50, 52]
    assert plan.max_seqlen_q == 16
    assert not plan.groups


def test_a_mask_is_refused():
    x = torch.zeros(3, 1, 2, 4)
    with pytest.raises(ValueError, match="neither a mask nor a bias"):
        attention_with(None)(x, x, x, torch.zeros(3, 3), packed_seq_params=packed([3]))
