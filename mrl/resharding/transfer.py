"""Execution of a plan's copies between ranks, bucket by bucket, with a checksum for each part.

`resharding/plan.py` chooses the copies; a sink of the caller receives the data. There are three ways from one rank to
another, and each copy takes the first one that is possible:

- Shared tensors (`shared_memory_peers.py`): the receiver reads the tensors of a rank of the same host in shared memory.
  That is one pass over memory, like a copy inside a rank.
- Shared messages (`message_transport.py`): the sender packs a message into a buffer in shared memory of the host; ranks
  of that host read it there.
- Sent messages: through sockets, or between GPUs. A message is one contiguous buffer per pair of ranks and round (gloo
  corrupts non-contiguous tensors).

In each case the sender states the sum of the bits that it read from its tensors. It must equal the sum of the bits
written by the receiver (`WeightSlice.write_to`). One comparison thus detects damage in transit, sources that changed
while they were read, and lost writes. Sums are computed while bytes are copied; a rank makes an additional pass only
over parts that others read in its memory and that it does not copy itself. For a sink that stores slices for later,
the received bits are summed instead of the written ones.

While the messages of a round are in transit, the rank packs the next round, makes a part of its local copies, and
copies the previous round into place. A sink gets the slices roughly in the order of the target tensors, so that it may
wait for complete ones. The staging buffers, two to send and two to receive, are allocated at the first run and reused.

A failure on one rank raises on all: the ranks agree before each round, so that none waits for a message that never
comes. They also agree before any rank reads another's tensors, and after all have read, before any changes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.distributed.collectives import any_rank, raise_error_on_all_ranks
from mrl.resharding.buckets import round_bytes, rounds, schedule_local_copies
from mrl.resharding.checked_copy import copy_bits, sum_bits
from mrl.resharding.checksum import MODULUS, bits
from mrl.resharding.copy_op import Copy
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.fp8 import DTYPE as FP8
from mrl.resharding.layout import Region
from mrl.resharding.merged_weights import read_region
from mrl.resharding.message_transport import MessageTransport, TransferMessage
from mrl.resharding.shared_memory_peers import SharedMemoryPeers
from mrl.resharding.weight_slice import WeightSlice

_CAST_BYTES = 1 << 20
"""Copies inside a rank that need a cast are made in parts of this size, which stay in the CPU cache."""

Sink = Callable[[Sequence[WeightSlice]], None]
"""Receiver of slices; a sink that writes them with `WeightSlice.write_to` sets `written_sum`."""

Quantize = Callable[[Copy, Tensor], Tensor]
"""(copy, its source values) -> the values in FP8 that are sent."""


class Transfer:
    """One rank's part of a set of copies; runs any number of times.

    Attributes:
        all_written: True if the sink wrote every slice of the last run with `WeightSlice.write_to`.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        sources: Mapping[str, Tensor],
        target_dtypes: Mapping[str, str],
        *,
        rank: int,
        bucket_bytes: int,
        quantize: Quantize | None = None,
        device: torch.device | None = None,
        share: bool = True,
    ) -> None:
        """Splits the copies to the bucket size.

        Args:
            copies: Copies of all ranks, the same on each rank.
            sources: This rank's tensors by the names of its source layout; read at every run.
            target_dtypes: Target tensor of this rank -> dtype, as its layout names it.
            rank: Global rank of this process.
            bucket_bytes: Largest staging buffer, bytes; a rank has two to send and two to receive.
            quantize: Quantizer of copies into FP8; None: there are no such copies.
            device: Device of the staging buffers; None: that of the sources, or the CPU without sources.
            share: Let ranks of a host read each other's memory where possible.
        """
        self._rank = rank
        self._share = share
        self._sources = sources
        self._device = device or next((tensor.device for tensor in sources.values()), torch.device("cpu"))
        self._target_dtypes = target_dtypes
        self._quantize = quantize
        self._bucket_bytes = bucket_bytes
        self._copies = [part for copy in copies for part in copy.parts(bucket_bytes)]
        self._between = any(copy.source_rank != copy.target_rank for copy in copies)
        self._peers: SharedMemoryPeers | None = None
        self._local_copies: list[list[list[Copy]]] = []
        self._messages = MessageTransport((), rank, self._device, share=share)
        self._source_sums: dict[tuple[str, Region], Tensor] = {}
        self._read_sums: dict[Copy, Tensor] = {}
        self.all_written = False

    @property
    def num_rounds(self) -> int:
        """Number of message rounds per run, equal on all ranks; 0 before the first run."""
        return self._messages.num_rounds

    @property
    def staging_bytes(self) -> int:
        """Bytes of this rank's staging buffers; 0 before the first run."""
        return sum(buffer.numel() for pair in self._messages.buffers for buffer in pair)

    def free_buffers(self) -> None:
        """Releases the staging buffers, on all ranks of the job before the next run, which allocates them again."""
        self._messages.close()
        self._messages = MessageTransport((), self._rank, self._device, share=self._share)
        self._peers = None
        self._source_sums, self._read_sums = {}, {}

    def run(self, sink: Sink, verify: Callable[[int], object] | None = None) -> int:
        """Collective over the job: delivers all slices of this rank's targets to `sink`.

        Args:
            sink: Receives the slices.
            verify: Called last with the sum that `run` returns; raises on a mismatch.

        Returns:
            `bit_sum` over all delivered elements as their sources had them, modulo 2^64.

        Raises:
            RuntimeError: Any rank failed; raised on every rank, naming the failed rank, the round and the tensors.
        """
        state = _RunState()
        peers = self._prepare()
        self.all_written = True
        self._source_sums, self._read_sums = {}, {}
        in_transit: list[dist.Work] = []
        for number in range(-1, self.num_rounds):  # the round whose messages are in transit
            posted: list[dist.Work] = []
            if number + 1 < self.num_rounds:
                state.attempt(self._pack_round, number + 1)
                if any_rank(state.error is not None):
                    _wait(in_transit)
                    raise_error_on_all_ranks(state.error)
                posted = self._messages.send(number + 1)
                state.attempt(self._unpack_shared, number + 1, sink)
            for bucket in self._local_copies[number + 1]:
                state.attempt(self._copy, bucket, sink)
            _wait(in_transit)
            if number >= 0:
                state.attempt(self._unpack_received, number, sink)
            in_transit = posted
        if peers.copies:
            state.attempt(self._publish_sums, peers)
            raise_error_on_all_ranks(state.error)
            state.attempt(self._check_peer_sums, peers)
        if verify is not None:
            state.attempt(verify, state.total % MODULUS)
        raise_error_on_all_ranks(state.error)
        return state.total % MODULUS

    def _prepare(self) -> SharedMemoryPeers:
        """Collective over the job: chooses the transport of each copy, again if shared tensors moved.

        No rank changes its tensors after this until the run ends.
        """
        peers = self._peers
        if peers is None or (peers.copies and any_rank(not peers.is_unchanged())):
            self._peers = None  # a failure below repeats the setup at the next run
            peers = SharedMemoryPeers(self._copies, self._sources, self._rank)
            if self._between:
                peers.exchange(share=self._share, read=self._share and self._device.type == "cpu")
            self._assign_copies(peers)
            self._peers = peers
        return peers

    def _assign_copies(self, peers: SharedMemoryPeers) -> None:
        """Collective over the job: assigns copies to local buckets and to rounds of messages."""
        read = set(peers.copies)
        by_message = [copy for copy in self._copies if copy.source_rank != copy.target_rank and copy not in read]
        to_this_rank = (copy for copy in self._copies if copy.target_rank == self._rank)
        own = [copy for copy in to_this_rank if copy.source_rank == self._rank or copy in read]
        batches = rounds(by_message, round_bytes(by_message, self._bucket_bytes))
        self._local_copies = schedule_local_copies(own, self._rank, batches, self._bucket_bytes)
        self._messages.close()  # releases the old buffers before new ones are allocated
        self._messages = MessageTransport(batches, self._rank, self._device, share=self._share)

    def _publish_sums(self, peers: SharedMemoryPeers) -> None:
        """Publishes the sums of the parts that peers read; reuses the sums of this rank's own copies."""
        totals = []
        for copy in peers.exported_copies():
            part = copy.source_name, copy.source_region
            if part not in self._source_sums:
                self._source_sums[part] = sum_bits(self._source(copy))
            totals.append(self._source_sums[part])
        peers.publish_sums(totals)

    def _check_peer_sums(self, peers: SharedMemoryPeers) -> None:
        """Compares the sums of the elements read from peers with the sums that the peers published."""
        for copy, sent in peers.peer_sums():
            found = int(self._read_sums[copy])
            if sent != found:
                item = WeightSlice(copy.target_name, copy.target_region, peers.peer_view(copy))
                raise RuntimeError(f"read from rank {copy.source_rank}: {describe_mismatch(item, sent, found)}")

    def _pack_round(self, number: int) -> None:
        """Fills the messages of a round with the copies' bytes and their sums."""
        for message in self._messages.outgoing(number):
            self._pack(message)

    def _unpack_received(self, number: int, sink: Sink) -> int:
        """Delivers the messages of a round that were sent to this rank."""
        return sum(self._unpack(number, message, sink) for message in self._messages.received(number))

    def _unpack_shared(self, number: int, sink: Sink) -> int:
        """Delivers the messages of a round that this rank reads in shared memory, before the ranks agree again."""
        return sum(self._unpack(number, message, sink) for message in self._messages.shared(number))

    def _source(self, copy: Copy) -> Tensor:
        """Returns a copy's source values: a view in the stored dtype, or the quantized values if FP8 is sent."""
        if copy.source_rank != self._rank and self._peers is not None:
            return self._peers.peer_view(copy)
        values = read_region(self._sources, copy.source_name, copy.source_region)
        return values if self._quantize is None or copy.wire_dtype != FP8 else self._quantize(copy, values)

    def _copy(self, bucket: Sequence[Copy], sink: Sink) -> int:
        """Makes a bucket of copies without messages; a copy that needs a cast is made in small parts."""
        plain, values, total = [], [], 0
        for copy in bucket:
            found = self._source(copy)
            if found.dtype == self._dtype(copy):
                plain.append(copy)
                values.append(found)
            else:
                total += self._cast(copy, sink)
        items, sum_of_plain = self._deliver(plain, values, None, "copy", sink)
        for copy, item in zip(plain, items, strict=True):
            if item.source_sum is not None:
                self._record_sum(copy, item.source_sum)
        return total + sum_of_plain

    def _record_sum(self, copy: Copy, total: Tensor) -> None:
        """Stores the sum of the bits that a copy read."""
        if copy.source_rank == self._rank:
            self._source_sums[copy.source_name, copy.source_region] = total
        else:
            self._read_sums[copy] = total

    def _cast(self, copy: Copy, sink: Sink) -> int:
        """Makes a copy into another dtype; sums the bits that it reads from a peer's tensor."""
        total, read = 0, torch.zeros((), dtype=torch.int64)
        for part in copy.parts(_CAST_BYTES):
            values = self._source(part)
            if copy.source_rank != self._rank:
                read = read + sum_bits(values)
            total += self._deliver([part], [values], None, "copy", sink)[1]
        if copy.source_rank != self._rank:
            self._record_sum(copy, read)
        return total

    def _dtype(self, copy: Copy) -> torch.dtype:
        return DTYPES[self._target_dtypes[copy.target_name]]

    def _deliver(
        self, copies: Sequence[Copy], values: Sequence[Tensor], sent: Tensor | None, where: str, sink: Sink
    ) -> tuple[list[WeightSlice], int]:
        """Casts values to the target dtype and delivers them to the sink.

        Args:
            copies: Copies that `values` belong to.
            values: Source values of each copy.
            sent: `bits` of each copy's values at the sender; None: computed here.
            where: Prefix of error messages.
            sink: Receives the slices.

        Returns:
            (delivered slices, sum of their source bits).
        """
        items = []
        for number, (copy, data) in enumerate(zip(copies, values, strict=True)):
            given = None if sent is None else sent[number]
            dtype = self._dtype(copy)
            if data.dtype != dtype:
                arrived = WeightSlice(copy.target_name, copy.target_region, data, given)
                if given is not None and int(bits(data)) != int(given):
                    raise RuntimeError(f"{where}: {describe_mismatch(arrived, int(given), int(bits(data)))}")
                data, given = data.to(dtype), None
            items.append(WeightSlice(copy.target_name, copy.target_region, data, given))
        total, written = deliver(items, sink, where)
        self.all_written &= written
        return items, total

    def _pack(self, message: TransferMessage) -> None:
        parts, sums = message.parts()
        for number, (copy, part) in enumerate(zip(message.copies, parts, strict=True)):
            sums[number] = copy_bits(part, self._source(copy))[1]

    def _unpack(self, number: int, message: TransferMessage, sink: Sink) -> int:
        """Delivers a message; raises if a sum differs from the sender's."""
        parts, sums = message.parts()
        where = f"round {number + 1} of {self.num_rounds}, message from rank {message.peer}"
        return self._deliver(message.copies, parts, sums, where, sink)[1]


class _RunState:
    """Sum of the delivered elements and the first error of a run; after an error nothing more is attempted."""

    def __init__(self) -> None:
        self.total = 0
        self.error: Exception | None = None

    def attempt(self, action: Callable[..., object], *args: object) -> None:
        """Calls `action` unless an earlier call failed; adds its result to `total` if it is an int."""
        if self.error is None:
            try:
                found = action(*args)
                self.total += found if isinstance(found, int) else 0
            except Exception as caught:  # noqa: BLE001 - any failure must reach the other ranks
                self.error = caught


def _wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


def deliver(items: Sequence[WeightSlice], sink: Sink, where: str) -> tuple[int, bool]:
    """Passes slices to a sink and compares the sums of source bits and of delivered bits.

    Args:
        items: Slices; those without `source_sum` get the sum of their delivered bits.
        sink: Receives the slices.
        where: Prefix of error messages.

    Returns:
        (sum of the source bits modulo 2^64, whether all slices were written with `WeightSlice.write_to`).

    Raises:
        RuntimeError: The sink failed, or sums differ; the message names the tensors.
    """
    if not items:
        return 0, True
    try:
        sink(items)
    except Exception as error:
        raise RuntimeError(f"{where}: writing {_format_names(items)} failed: {error}") from error
    source_sums, delivered_sums = [], []
    for item in items:
        delivered = item.written_sum if item.written_sum is not None else bits(item.data)
        item.source_sum = item.source_sum if item.source_sum is not None else delivered
        delivered_sums.append(delivered)
        source_sums.append(item.source_sum)
    sums = torch.stack([torch.stack(source_sums), torch.stack(delivered_sums)]).tolist()  # waits for a GPU once
    for item, sent, arrived in zip(items, *sums, strict=True):
        if sent != arrived:
            raise RuntimeError(f"{where}: {describe_mismatch(item, sent, arrived)}")
    return sum(sums[0]) % MODULUS, all(item.written_sum is not None for item in items)


def describe_mismatch(item: WeightSlice, sent: int, arrived: int) -> str:
    """Returns an error message: a slice arrived damaged, or arrived intact and was not written as it is."""
    received = int(bits(item.data))
    region = f"'{item.name}' {list(item.region)}"
    if received == sent:
        return (
            f"checksum mismatch after writing {region}: expected {sent % MODULUS:016x}, stored "
            f"{arrived % MODULUS:016x}; a write was dropped or overwritten"
        )
    return (
        f"checksum mismatch on arrival of {region}: sent {sent % MODULUS:016x}, received {received % MODULUS:016x}; "
        "the data was damaged in transit"
    )


def _format_names(items: Iterable[WeightSlice]) -> str:
    """Formats the names of the target tensors; names only the first and the last if there are several."""
    names = list(dict.fromkeys(item.name for item in items))
    return f"'{names[0]}'" if len(names) == 1 else f"'{names[0]}' to '{names[-1]}' ({len(names)} tensors)"
