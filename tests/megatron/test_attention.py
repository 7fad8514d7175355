"""Packed causal attention against one dense float64 attention per sequence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.data.prefixes import Prefixes, each_token
from mrl.megatron.attention import MAX_PADDING, SMALL_BUCKET_TOKENS, CoreAttention, pack
from mrl.megatron.te_attention import pack_for_te

VALUE = 2e-6  # fp32 softmax and sums of at most 2,000 terms of order 1
GRADIENT = 2e-5  # sums of as many products; keys of long sequences collect the most

CPU = torch.device("cpu")
SHORT = [5, 9, 3, 7, 1, 9, 16, 2]
MIXED = [2100, 20, 2000, 1, 900]
"""Several buckets, one of them with padding."""


def packed(lens):
    return pack(lens, each_token(sum(lens)), CPU)


def dense(query, key, value, lens):
    outputs = []
    group = query.size(2) // key.size(2)
    for q, k, v in zip(*(x.squeeze(1).split(lens) for x in (query, key, value)), strict=True):
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qnd,knd->nqk", q, k) / q.size(2) ** 0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        outputs.append(torch.einsum("nqk,knd->qnd", scores.masked_fill(hidden, -torch.inf).softmax(2), v))
    return torch.cat(outputs).flatten(1).unsqueeze(1)


@pytest.mark.parametrize(
    ("lens", "heads", "groups"),
    [(SHORT, 4, 2), (SHORT, 4, 4), (SHORT, 4, 1), (MIXED, 2, 1), ([40, 33, 12], 4, 2), ([1], 2, 2)],
    ids=str,
)
def test_values_and_gradients_are_those_of_each_sequence_alone(lens, heads, groups):
    generator = torch.Generator().manual_seed(2)
    shapes = [(sum(lens), 1, count, 8) for count in (heads, groups, groups)]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    attention = CoreAttention(None, 1, None, "self")
    plan = packed(lens)
    found = attention(*inputs, None, packed_seq_params=plan)
    expected = dense(*exact, lens)
    torch.testing.assert_close(found, expected.float(), rtol=VALUE, atol=VALUE)
    grad = torch.randn(found.shape, generator=generator)
    found.backward(grad)
    expected.backward(grad.double())
    for ours, theirs in zip(inputs, exact, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad.float(), rtol=GRADIENT, atol=GRADIENT)


@pytest.mark.parametrize(
    "lens", [SHORT, MIXED, [7] * 40, [4096, 1], list(range(1, 300))], ids=lambda lens: str(len(lens))
)
def test_every_token_has_one_slot_and_buckets_hold_little_padding(lens):
    plan = packed(lens)
    assert sum(bucket.size for bucket in plan.buckets) == len(lens)
    assert plan.token_to_slot.unique().numel() == sum(lens)
    assert torch.equal(plan.slot_to_token[plan.token_to_slot], torch.arange(sum(lens)))
    start = 0
    for bucket in plan.buckets:
        slots = bucket.size * bucket.longest
        inside = (plan.token_to_slot >= start) & (plan.token_to_slot < start + slots)
        assert slots <= SMALL_BUCKET_TOKENS or int(inside.sum()) >= (1 - MAX_PADDING) * slots
        start += slots
    assert start == plan.slot_to_token.numel()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_distinct_tokens_may_be_numbered_in_any_order(lens, random):
    """Rows lie in the order of the numbers; what is attended to is the same."""
    order = list(range(sum(lens)))
    random.shuffle(order)
    number_of, origin = torch.tensor(order), torch.tensor(order).argsort()
    generator = torch.Generator().manual_seed(sum(lens))
    inputs = [torch.randn(sum(lens), 1, count, 4, generator=generator) for count in (2, 1, 1)]
    attention = CoreAttention(None, 1, None, "self")
    laid = [rows[origin] for rows in inputs]
    found = attention(*laid, None, packed_seq_params=pack(lens, Prefixes(number_of, origin), CPU))
    torch.testing.assert_close(found[number_of], dense(*inputs, lens), rtol=VALUE, atol=VALUE)


def test_short_sequences_make_one_call():
    assert len(packed([15] * 100 + [9] * 100).buckets) == 1


def test_transformer_engine_gets_plain_packed_sequences():
    plan = pack_for_te(SHORT, CPU)
    assert plan.qkv_format == "thd"
    assert plan.cu_seqlens_q.tolist() == [0, 5, 14, 17, 24, 25, 34, 50, 52]
    assert plan.max_seqlen_q == 16
    assert not plan.buckets


def test_a_mask_is_refused():
    x = torch.zeros(3, 1, 2, 4)
    with pytest.raises(ValueError, match="neither a mask nor a bias"):
        CoreAttention(None, 1, None, "self")(x, x, x, torch.zeros(3, 3), packed_seq_params=packed([3]))
