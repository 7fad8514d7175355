"""Reads of other ranks' tensors in shared memory, and detection of misread or changed elements."""

import pytest
import torch
import torch.distributed as dist

from mrl.distributed import shared_memory
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.transfer import Transfer
from tests.ranks import run_ranks
from tests.resharding.test_transfer import LostSource, Setup, arrives_in_both_sinks


class SharedSetup(Setup):
    """A setup whose sources are in shared memory, except on `hidden` ranks."""

    def __init__(self, *args, hidden=(), **kwargs):
        super().__init__(*args, **kwargs)
        if dist.get_rank() not in hidden:
            shared_memory.share(self.sources.values())


class CountingTransfer(Transfer):
    """Counts reads in shared memory, and the sums computed only for other ranks."""

    def _assign_copies(self, peers):
        super()._assign_copies(peers)
        self.read = [copy for copy in peers.copies if copy.target_rank == self._rank]
        self.sorted = getattr(self, "sorted", 0) + 1

    def _publish_sums(self, peers):
        before = set(self._source_sums)
        super()._publish_sums(peers)
        self.summed = len(set(self._source_sums) - before)


def reads_peers(grid, source_dtype, target_dtype, hidden, bucket_bytes=3000):
    setup = SharedSetup("biases, tied", grid, source_dtype, target_dtype, hidden=hidden)
    transfer = arrives_in_both_sinks(setup, setup.transfer(bucket_bytes, CountingTransfer, True))
    others = sum(copy.source_rank != dist.get_rank() == copy.target_rank for copy in transfer._copies)
    return len(transfer.read), others, transfer.num_rounds, transfer.staging_bytes, transfer.sorted, transfer.summed


PIPELINE = ParallelLayout(4, 2, 2, rollout_tp=4)


@pytest.mark.parametrize("source, target", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_tensors_of_peers_are_read_without_messages(source, target):
    for read, others, rounds, staged, searches, _ in run_ranks(4, reads_peers, PIPELINE, source, target, ()):
        assert read == others > 0
        assert (rounds, staged, searches) == (0, 0, 1)


def test_sums_of_own_copies_are_reused():
    for read, _, _, _, _, summed in run_ranks(2, reads_peers, ParallelLayout(2, 2), "float32", "float32", ()):
        assert read > 0 == summed


def test_ranks_without_shared_tensors_send_messages():
    found = run_ranks(4, reads_peers, PIPELINE, "float32", "float32", (1,))
    assert all(rounds > 0 for _, _, rounds, *_ in found)
    assert any(0 < read < others for read, others, *_ in found)


def moves_between_runs():
    """Rank 1's tensors move into another buffer, then out of any."""
    setup = SharedSetup("biases, tied", ParallelLayout(2, 2))
    transfer, rounds = setup.transfer(3000, CountingTransfer, True), []
    for change in (lambda: None, lambda: shared_memory.share(setup.sources.values()), leaves_shared_memory(setup)):
        if dist.get_rank() == 1:
            change()
        for tensor in (*setup.tensors.values(), *setup.sources.values()):
            tensor.add_(1)
        transfer.run(setup.write)
        for key, expected in setup.expected.items():
            expected += 1
            assert torch.equal(setup.tensors[key].float(), expected), key
        rounds.append(transfer.num_rounds > 0)
    return rounds, transfer.sorted


def leaves_shared_memory(setup):
    def leave():
        for tensor in setup.sources.values():
            tensor.data = tensor.clone()

    return leave


def test_tensors_that_moved_are_found_again():
    for rounds, searches in run_ranks(2, moves_between_runs):
        assert rounds == [False, False, True]
        assert searches == 3


class ChangesTensors(Transfer):
    """Rank 1 changes its tensors after the other rank has read them and before the sums are computed."""

    def _publish_sums(self, peers):
        dist.barrier()
        if dist.get_rank() == 1:
            for tensor in self._sources.values():
                tensor.view(-1)[3] += 1
            self._source_sums.clear()
        return super()._publish_sums(peers)


class MisreadsBit(Transfer):
    """Rank 0 misreads one bit of a peer's tensor."""

    def _source(self, copy):
        values = super()._source(copy)
        if dist.get_rank() == 0 and copy.source_rank == 1 and copy.target_name == "layers.2.down":
            values = values.clone()
            values.view(-1).view(torch.int32)[1] ^= 4
        return values


def fails_to_read(kind, target="float32"):
    setup = SharedSetup("biases, tied", ParallelLayout(2, 1, 2), "float32", target)
    transfer = setup.transfer(1 << 20, kind, True)
    try:
        transfer.run(setup.write)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_a_bit_read_wrongly_is_found(target):
    messages = run_ranks(2, fails_to_read, MisreadsBit, target)
    assert len(set(messages)) == 1
    assert (
        "rank 0 failed: RuntimeError: read from rank 1: checksum mismatch after writing 'layers.2.down'" in messages[0]
    )


def test_tensors_that_changed_between_reading_and_summing_are_found():
    messages = run_ranks(2, fails_to_read, ChangesTensors)
    assert len(set(messages)) == 1
    assert "rank 0 failed: RuntimeError: read from rank 1: checksum mismatch after writing" in messages[0]


def cannot_sum():
    setup = SharedSetup("biases, tied", PIPELINE)
    try:
        setup.transfer(1 << 20, LostSource, True).run(setup.write)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_cannot_sum_what_it_shows_makes_every_rank_raise():
    messages = run_ranks(4, cannot_sum)
    assert len(set(messages)) == 1
    assert "rank 2 failed: ValueError: no source" in messages[0]
