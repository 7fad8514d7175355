"""Messages go in rounds that no rank's staging buffers are too small for; `pack` needs little more than its samples."""

import json
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.rollout.all_to_all import MIN_STAGING_BYTES, RankMessage, send_messages, split_into_rounds, staging_limit
from tests.ranks import run_ranks
from tests.source import ROOT

MORE_THAN_THE_SAMPLES = 1.3  # the bound on the peak of `pack`, over the bytes of a rank's samples
RANKS = 5
sizes = st.integers(0, MIN_STAGING_BYTES // 2).map(lambda words: 4 * words)
messages = st.lists(
    st.builds(RankMessage, st.integers(0, 99), st.integers(0, RANKS - 1), st.integers(0, RANKS - 1), sizes), max_size=40
)


@settings(max_examples=50, deadline=None)
@given(messages)
def test_every_message_has_one_round_and_every_round_fits(given_messages):
    found = split_into_rounds(given_messages)
    key = lambda one: (one.item, one.sender, one.receiver, one.num_bytes)  # noqa: E731
    assert sorted(map(key, (one for members in found for one in members))) == sorted(map(key, given_messages))
    for members in found:
        assert members
        for side in ("sender", "receiver"):
            of_rank, count = Counter(), Counter()
            for one in members:
                of_rank[getattr(one, side)] += one.num_bytes
                count[getattr(one, side)] += bool(one.num_bytes)
            over = {rank for rank, size in of_rank.items() if size > staging_limit(given_messages)}
            assert all(count[rank] == 1 for rank in over)  # longer than any staging


def test_senders_are_at_work_together():
    """Each sends each as much, but all of one sender's messages come before the next one's."""
    size = MIN_STAGING_BYTES // 8
    everyone = [RankMessage(0, sender, to, size) for sender in range(RANKS) for _ in range(20) for to in range(RANKS)]
    fewest = 20 * RANKS * size / staging_limit(everyone)
    assert len(split_into_rounds(everyone)) <= 2 * fewest


def arrived(given_messages):
    import torch
    import torch.distributed as dist

    found = []

    def write(item, part):
        part.fill_(item + 7 * dist.get_rank())

    def read(item, part):
        assert part.unique().numel() <= 1
        found.append((item, int(part[0]) if part.numel() else -1, part.numel(), part.dtype == torch.uint8))

    send_messages(given_messages, dist.get_rank(), write, read)
    return found


def test_what_is_written_is_read_at_its_receiver():
    some = [RankMessage(i, i % 3, (i * i + 1) % 4, 4 * (i % 5) * MIN_STAGING_BYTES // 8) for i in range(24)]
    for rank, found in enumerate(run_ranks(4, arrived, some)):
        mine = [one for one in some if one.receiver == rank]
        values = [(one.item, one.item + 7 * one.sender if one.num_bytes else -1, one.num_bytes, True) for one in mine]
        assert sorted(found) == sorted(values)


@pytest.mark.slow
def test_a_rank_of_256_packs_in_little_more_than_its_samples_memory():
    """With 94 layers of routing, of which it sends each stage its own."""
    command = [sys.executable, "tools/bench_exchange.py", "--million-tokens", "8", "--layers", "94", "--alone"]
    found = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    assert 1 <= found["ratio"] <= MORE_THAN_THE_SAMPLES
    assert found["samples_bytes"] > 90 * found["tokens_of_rank"]  # 12 layers x 8 experts of a token, one byte each
