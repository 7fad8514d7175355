"""Plans run between real ranks over gloo."""

import time

import pytest
import torch
import torch.distributed as dist

from mrl.parallel_layout import ParallelLayout
from mrl.resharding.checksum import MODULUS, bit_sum
from mrl.resharding.dtypes import allocate
from mrl.resharding.megatron import megatron_layouts
from mrl.resharding.native import native_layouts
from mrl.resharding.plan import make_plan
from mrl.resharding.regions import slices
from mrl.resharding.transfer import Transfer
from tests.ranks import run_ranks
from tests.resharding.archs import ARCHS, counted, filled


class Setup:
    """One rank's side of Megatron -> native."""

    def __init__(self, name, grid, source_dtype="float32", target_dtype="float32"):
        arch, rank = ARCHS[name], dist.get_rank()
        hf = {key: tensor % 97 + 0.5 for key, tensor in counted(arch).items()}  # exact in bfloat16
        sources = megatron_layouts(arch, grid, dtype=source_dtype, te=False)
        targets = native_layouts(arch, grid, target_dtype)
        self.plan = make_plan(sources, targets)
        self.tensors = allocate(targets[rank])
        for tensor in self.tensors.values():
            tensor.zero_()
        own = allocate(sources[rank])
        for key, tensor in filled(sources[rank], hf).items():
            own[key].copy_(tensor)
        self.sources = own
        self.dtypes = {key: stored.dtype for key, stored in targets[rank].items()}
        self.expected = filled(targets[rank], hf)

    def transfer(self, bucket_bytes, kind=Transfer, share=False):
        rank = dist.get_rank()
        return kind(self.plan.copies, self.sources, self.dtypes, rank=rank, bucket_bytes=bucket_bytes, share=share)

    def write(self, arrivals):
        for item in arrivals:
            item.write_to(self.tensors[item.name])

    def keep(self, arrivals):
        """Stores slices without `write_to`, as an engine that assembles them elsewhere."""
        for item in arrivals:
            self.tensors[item.name][slices(item.region)].copy_(item.data)


def arrives(name, grid, bucket_bytes, source_dtype, target_dtype, kind=Transfer, share=False):
    setup = Setup(name, grid, source_dtype, target_dtype)
    return arrives_in_both_sinks(setup, setup.transfer(bucket_bytes, kind, share)).num_rounds


def arrives_in_both_sinks(setup, transfer):
    for sink, written in ((setup.write, True), (setup.keep, False)):
        for tensor in setup.tensors.values():
            tensor.zero_()
        total = transfer.run(sink)
        for key, expected in setup.expected.items():
            assert torch.equal(setup.tensors[key].float(), expected), key
        assert total == sum(map(bit_sum, setup.tensors.values())) % MODULUS
        assert transfer.all_written == written
    return transfer


class OddRanksShare(Transfer):
    """Ranks of even number do not share their buffers, as on a host without space in shared memory."""

    def _assign_copies(self, peers):
        self._share = dist.get_rank() % 2 == 1
        super()._assign_copies(peers)


SHARING = [
    (Transfer, False),
    (Transfer, True),
    (OddRanksShare, True),
]


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize(
    "grid",
    [
        ParallelLayout(4, 2, 2, 1, rollout_tp=1),
        ParallelLayout(4, 1, 2, 2, rollout_tp=4),
        ParallelLayout(4, 4, 1, 1, rollout_tp=2),
        ParallelLayout(4, 2, 1, 1, rollout_tp=4),
    ],
    ids=str,
)
def test_every_rank_gets_its_bytes(name, grid):
    assert set(run_ranks(4, arrives, name, grid, 1 << 20, "float32", "float32")) == {1}


@pytest.mark.parametrize("kind, share", SHARING)
@pytest.mark.parametrize("source, target", [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_many_small_rounds_and_casts_give_the_same(source, target, kind, share):
    grid = ParallelLayout(4, 2, 2, 1, rollout_tp=4)
    rounds = run_ranks(4, arrives, "biases, tied", grid, 1000, source, target, kind, share)
    assert len(set(rounds)) == 1
    assert rounds[0] > 10


class SlowReader(Transfer):
    """Rank 1 has packed long before the others have read."""

    def _unpack_shared(self, number, sink):
        if dist.get_rank() != 1:
            time.sleep(0.005)
        return super()._unpack_shared(number, sink)


def sends_through_memory(bucket_bytes):
    arrives("biases, tied", ParallelLayout(4, 2, 2, rollout_tp=4), bucket_bytes, "float32", "float32", SlowReader, True)
    transfer = Setup("biases, tied", ParallelLayout(4, 2, 2, rollout_tp=4)).transfer(
        bucket_bytes, RecordingTransfer, True
    )
    transfer.run(lambda items: None)
    received = sum(receive.numel() for _, receive in transfer._messages.buffers)
    return received, [number for name, number in transfer.events if name == "shared"], transfer.num_rounds


def test_ranks_of_a_host_read_each_others_send_buffers():
    for received, read, rounds in run_ranks(4, sends_through_memory, 5000):
        assert received == 0, "nothing is received that is read where it lies"
        assert read == list(range(rounds))


class LostPart(Transfer):
    """Rank 3 writes another value of one part than it received."""

    def _deliver(self, copies, values, sent, where, sink):
        def harm(items):
            sink(items)
            for item in items:
                if dist.get_rank() == 3 and item.name == "layers.2.down":
                    item.written_sum = item.written_sum + 1

        return super()._deliver(copies, values, sent, where, harm)


class FlippedBit(Transfer):
    """Rank 1 damages one bit of the second message that it sends, after its checksum was taken."""

    sent = 0

    def _pack(self, message):
        super()._pack(message)
        self.sent += 1
        if dist.get_rank() == 1 and self.sent == 2:
            message.data[5] ^= 1


class LostSource(Transfer):
    """Rank 2 fails to read the values that it sends."""

    def _source(self, copy):
        if dist.get_rank() == 2 and copy.target_rank != 2:
            raise ValueError("no source")
        return super()._source(copy)


def fails(kind, bucket_bytes, share=False):
    setup = Setup("biases, tied", ParallelLayout(4, 2, 2, 1, rollout_tp=1))
    try:
        setup.transfer(bucket_bytes, kind, share).run(setup.write)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_lost_write_raises_on_every_rank():
    messages = run_ranks(4, fails, LostPart, 4000)
    assert len(set(messages)) == 1
    assert "rank 3 failed" in messages[0]
    assert "checksum mismatch after writing 'layers.2.down'" in messages[0]
    assert "a write was dropped" in messages[0]


@pytest.mark.parametrize("share", [False, True])
def test_a_flipped_bit_on_the_way_is_found_and_every_rank_raises(share):
    messages = run_ranks(4, fails, FlippedBit, 4000, share)
    assert len(set(messages)) == 1
    assert "message from rank 1: checksum mismatch on arrival of" in messages[0]
    assert "arrival of 'embed'" in messages[0]


@pytest.mark.parametrize("share", [False, True])
def test_a_rank_that_cannot_send_makes_every_rank_raise_and_none_wait(share):
    messages = run_ranks(4, fails, LostSource, 4000, share)
    assert len(set(messages)) == 1
    assert "rank 2 failed: ValueError: no source" in messages[0]


def refuses_one_tensor(arrivals):
    if dist.get_rank() == 3 and any(item.name == "layers.2.down" for item in arrivals):
        raise OSError("no room")


def sink_fails(bucket_bytes):
    setup = Setup("biases, tied", ParallelLayout(4, 2, 2, 1, rollout_tp=1))
    try:
        setup.transfer(bucket_bytes).run(refuses_one_tensor)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_failing_write_names_rank_and_tensors_on_every_rank():
    messages = run_ranks(4, sink_fails, 2000)
    assert len(set(messages)) == 1
    assert "rank 3 failed" in messages[0]
    assert "layers.2.down" in messages[0]
    assert "no room" in messages[0]


class RecordingTransfer(Transfer):
    """Records the order of events."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.events = []

    def _pack_round(self, number):
        self.events.append(("pack", number))
        return super()._pack_round(number)

    def _unpack_shared(self, number, sink):
        self.events.append(("shared", number))
        return super()._unpack_shared(number, sink)

    def _copy(self, bucket, sink):
        self.events.append(("copy", len(bucket)))
        return super()._copy(bucket, sink)

    def _unpack_received(self, number, sink):
        self.events.append(("unpack", number))
        return super()._unpack_received(number, sink)


def records_events(bucket_bytes):
    setup = Setup("biases, tied", ParallelLayout(4, 2, 2, rollout_tp=4))
    transfer = setup.transfer(bucket_bytes, RecordingTransfer)
    before, places = transfer.staging_bytes, []
    for _ in range(2):
        transfer.run(setup.write)
        places.append([buffer.data_ptr() for pair in transfer._messages.buffers for buffer in pair])
    most = max(sum(map(len, way.values())) for peers in transfer._messages.rounds for way in peers)
    return transfer.events, transfer.num_rounds, before, transfer.staging_bytes, places, most


def test_messages_overlap_with_copies():
    for events, rounds, *_ in run_ranks(4, records_events, 5000):
        order = events[: len(events) // 2]
        assert events == order * 2
        assert rounds > 3
        for number in range(rounds - 1):
            assert order.index(("pack", number + 1)) < order.index(("unpack", number))
        first = order[order.index(("pack", 0)) : order.index(("unpack", 0))]
        assert any(name == "copy" for name, _ in first)


def test_buffers_are_allocated_once_and_bounded():
    bucket_bytes = 5000
    for _, _, before, staging_bytes, (first, second), most in run_ranks(4, records_events, bucket_bytes):
        assert before == 0
        assert first == second
        assert 0 < staging_bytes <= 4 * (bucket_bytes + 16 * most)  # copies align; each has a sum
