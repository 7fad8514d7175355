"""The ledger only grows, and what it holds is what is trained."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.rollout.episodes.token_record import Ledger
from mrl.types import Prompt, Rollout

PARTS = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 99), min_size=1, max_size=5)), max_size=12)


@settings(max_examples=200, deadline=None)
@given(PARTS, st.integers(1, 40))
def test_the_ledger_only_grows(parts, limit):
    ledger, ids, mask = Ledger(limit), [], []
    for sampled, tokens in parts:
        fits = len(ids) + len(tokens) <= limit - (not sampled)
        if fits:
            (ledger.append_sampled if sampled else ledger.append_observed)(tokens)
            ids, mask = ids + tokens, mask + [sampled] * len(tokens)
        else:
            with pytest.raises(ValueError, match="tokens after"):
                (ledger.append_sampled if sampled else ledger.append_observed)(tokens)
        assert (list(ledger.ids), list(ledger.sampled_mask)) == (ids, mask)


@settings(max_examples=200, deadline=None)
@given(PARTS.filter(bool))
def test_segments_are_the_response_in_order(parts):
    mask = [sampled for sampled, tokens in parts for _ in tokens]
    ids = [token for _, tokens in parts for token in tokens]
    rollout = Rollout(Prompt(0, (1,), ""), 0, ids, [0.0] * len(ids), "stop", 0, sampled_mask=mask)
    assert [token for one in rollout.segments for token in ids[one.start : one.end]] == ids
    assert [one.sampled for one in rollout.segments for _ in range(one.start, one.end)] == mask
    kinds = [one.sampled for one in rollout.segments]
    assert all(one != other for one, other in pairwise(kinds))
    assert rollout.num_sampled == sum(mask)


@settings(max_examples=100, deadline=None)
@given(PARTS.filter(bool), st.data())
def test_another_sequence_than_the_ledgers_is_refused(parts, data):
    ledger = Ledger(1000)
    for sampled, tokens in parts:
        (ledger.append_sampled if sampled else ledger.append_observed)(tokens)
    ids, mask = list(ledger.ids), list(ledger.sampled_mask)
    ledger.check(Rollout(Prompt(0, (1,), ""), 0, ids, [0.0] * len(ids), "stop", 0, sampled_mask=mask))
    at = data.draw(st.integers(0, len(ids) - 1))
    change = data.draw(st.sampled_from(["id", "mask", "shorter"]))
    if change == "id":
        ids[at] += 1
    elif change == "mask":
        mask[at] = not mask[at]
    else:
        ids, mask = ids[:at], mask[:at]
    with pytest.raises(RuntimeError, match="the engine's tokens and the episode's ledger differ"):
        ledger.check(Rollout(Prompt(0, (1,), ""), 0, ids, [0.0] * len(ids), "stop", 0, sampled_mask=mask))
