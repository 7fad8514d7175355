"""Streams of several ranks: those of a replica do the same, and replicas share a queue in logical time."""

import random
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from mrl.engines._work_queue import WorkQueue
from mrl.engines.native import streaming_generation
from mrl.types import PartialRollout
from tests.engines.native.streams import (
    ALL,
    CUT,
    NARROW,
    SAMPLING,
    Parts,
    assert_same,
    disturbed,
    exact,
    key_of,
    undisturbed,
    work_of,
)
from tests.engines.native.test_engine import LOGPROB_ATOL
from tests.engines.native.tiny import make_checkpoint, make_engine
from tests.ranks import run_ranks

UNEVEN = replace(SAMPLING, stop_token_ids=tuple(range(12)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2")


@pytest.fixture(scope="module")
def engine(folder):
    return make_engine(folder, **NARROW)


def _on_ranks_of_a_replica(folder, sampling, settings):
    engine = make_engine(folder, tp_group=dist.group.WORLD, **settings)
    streaming_generation.poll_interval, usual = (lambda max_tokens: 3), streaming_generation.poll_interval
    whole, left = disturbed(engine, sampling)
    streaming_generation.poll_interval = usual
    return whole, left


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_two_ranks_of_a_replica_stop_and_go_on_alike(folder, engine, cut):
    sampling = replace(SAMPLING, return_kept_tokens=bool(cut), **cut)
    (whole, left), (other, other_left) = run_ranks(2, _on_ranks_of_a_replica, folder, sampling, NARROW)
    assert [r.kept_tokens is None for r in other] == [True] * len(other)  # of the first rank's alone
    assert other == whole and other_left == left
    assert any(left)
    assert_same(whole, undisturbed(engine, sampling), LOGPROB_ATOL)


def _one_rank_is_told(folder):
    engine, feed = make_engine(folder, tp_group=dist.group.WORLD), Parts([work_of(ALL[:4]), work_of(ALL[4:])], 9)
    engine.abort_requested = lambda: dist.get_rank() == 1 and feed.num_pulses > 1
    found = engine.generate_streaming(feed, replace(SAMPLING, max_tokens=60, ignore_eos=True))
    return found, feed.num_pulses, engine.stats()["decode_steps"]


def test_all_ranks_of_a_replica_stop_where_one_is_told(folder):
    first, second = run_ranks(2, _one_rank_is_told, folder)
    assert first == second
    begun, num_pulses, num_steps = first
    assert [(each.prompt.uid, each.sample_index) for each in begun] == sorted((prompt.uid, n) for prompt, n in ALL)
    assert num_pulses == 9 and num_steps < 3 * streaming_generation.poll_interval(60)


class Shared(WorkQueue):
    """The queue of all replicas: the next goes to the replica that has the fewest; stop once `enough` are whole.

    What a replica says is heard by all at the same pulse.
    """

    def __init__(self, queue, enough, most, delay):
        self.queue, self.enough, self.max_samples, self.delay = list(queue), enough, most, delay
        self.has, self.log = [0] * dist.get_world_size(), []

    def poll(self, finished, num_waiting):
        self.delay()
        heard = gathered(([exact(one) for one in finished], num_waiting))
        self.log.append(heard)
        self.has = [has - len(whole) for has, (whole, _) in zip(self.has, heard, strict=True)]
        self.enough -= sum(len(whole) for whole, _ in heard)
        if self.enough <= 0:
            return None
        mine = []
        while self.queue and min(self.has) < self.max_samples:
            rank = self.has.index(min(self.has))
            self.has[rank] += 1
            one = self.queue.pop(0)
            mine += [one] * (rank == dist.get_rank())
        new = [one for one in mine if not isinstance(one, PartialRollout)]
        return work_of(new, [one for one in mine if isinstance(one, PartialRollout)])


def gathered(one):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, one)
    return found


def _on_replicas(folder, seed):
    """Rounds that end when five samples more are whole, the others going on first; delays by `seed`."""
    engine, rng = make_engine(folder, max_num_seqs=3), random.Random(100 * seed + dist.get_rank())
    decode = engine._decode_eagerly

    def delay():
        time.sleep(rng.choice((0, 0, 0.001, 0.005)) if seed else 0)

    def late(batch, length):
        delay()
        return decode(batch, length)

    engine._decode_eagerly = late
    streaming_generation.poll_interval, usual = (lambda max_tokens: 1), streaming_generation.poll_interval
    whole, rounds, begun = [], [], []
    while len(whole) < len(ALL):
        known = {one[:2] for one in whole} | {key_of(one) for one in begun}
        queue = [*begun, *((prompt, sample) for prompt, sample in ALL if (prompt.uid, sample) not in known)]
        feed = Shared(queue, min(5, len(ALL) - len(whole)), 4, delay)
        lefts = gathered(engine.generate_streaming(feed, UNEVEN))
        late_ones = [one for one in feed.queue if isinstance(one, PartialRollout)]
        begun = sorted([one for left in lefts for one in left] + late_ones, key=key_of)
        whole += [one for heard in feed.log for found, _ in heard for one in found]
        rounds.append((feed.log, [[exact(one) for one in left] for left in lefts]))
    streaming_generation.poll_interval = usual
    return whole, rounds


def test_replicas_that_share_a_queue_do_the_same_whatever_is_late(folder, engine):
    expected = run_ranks(2, _on_replicas, folder, 0)
    (whole, rounds), other = expected
    assert other == (whole, rounds)
    assert len(rounds) > 2 and all(any(lefts[rank] for _, lefts in rounds) for rank in range(2))
    samples = {key_of(r): tuple(r.response_ids) for r in undisturbed(engine, UNEVEN)}
    assert sorted(one[:2] for one in whole) == sorted(samples)
    assert all(samples[one[:2]] == one[2] for one in whole)
    for seed in (1, 2, 3):
        assert run_ranks(2, _on_replicas, folder, seed) == expected
