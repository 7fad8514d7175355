"""Runs copies between ranks, bucket by bucket, with a checksum on every message.

Owns `Transfer`. Which copies there are is `resharding/plan.py`'s business; what happens to arriving data is the
caller's: it hands in a sink (`sink.py`). There are three ways from one rank to another, and each copy takes the first
that is open to it:

- a rank of the same host, whose tensors lie in memory that ranks share, is read there (`shared_memory_peers.py`): one
  pass over memory, by the receiver, like a copy inside a rank;
- a message (`message_layout.py`) is packed into a buffer in the host's memory, and ranks of that host read it there;
- a message goes through sockets, or between GPUs. It is one contiguous buffer per pair of ranks and round (gloo moves
  wrong bytes of anything else).

On each way the sender says the sums of the bits of what it gives, as it reads its tensors; each must be the sum of what
is written at the other end (`WeightSlice.write_to`), so one comparison finds what was damaged on the way, what changed
while it was read and what was lost at its end. Sums are taken where bytes are copied anyway: a rank reads a part for
its sum alone only where it gives it and does not copy it itself. Where a sink keeps slices for later, what it was given
is added up instead.

While the messages of a round are on their way, the next ones are put together, a part of the rank's own copies is made,
and what the last round brought is copied into place. What a sink is given runs through the targets' tensors about in
their order, so that it may wait for whole ones. The buffers for it, two to send and two to receive, are allocated
at the first run and kept.

A failure on one rank reaches all: the ranks agree before each round, so that none waits for a message that never comes.
They agree before any reads another one's tensors, and again when all have, before any may change its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.distributed import shared_memory
from mrl.distributed.collectives import any_rank, raise_together, together
from mrl.resharding.buckets import NUM_BUFFERS, round_bytes, rounds, turns
from mrl.resharding.checked_copy import copy_bits, sum_bits
from mrl.resharding.checksum import MODULUS, bits
from mrl.resharding.copy_op import Copy
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.fp8 import DTYPE as FP8
from mrl.resharding.layout import Region
from mrl.resharding.message_layout import by_peer, message_bytes, parts_of, places
from mrl.resharding.regions import slices
from mrl.resharding.shared_memory_peers import Neighbours
from mrl.resharding.sink import Sink, difference, hand_over
from mrl.resharding.transfer_work import Work
from mrl.resharding.weight_slice import WeightSlice

_CAST_BYTES = 1 << 20
"""Copies inside a rank that need a cast are made in parts of so many bytes, which stay in the cache."""

Quantize = Callable[[Copy, Tensor], Tensor]
"""(copy, the values of its source) -> what is sent of them in FP8."""


class Transfer:
    """One rank's part of a set of copies, ready to run any number of times.

    Attributes:
        num_rounds: Exchanges of messages in a run, the same on every rank; known from the first run on.
        written: Whether everything that this rank got in the last run was written with `WeightSlice.write_to`.
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
        """Sorts the copies into buckets and rounds.

        Args:
            copies: Of all ranks, the same on each.
            sources: This rank's tensors, by the names of its source layout; read at every run.
            target_dtypes: Dtype of each of this rank's targets, as its layout names it.
            rank: This rank.
            bucket_bytes: Largest staging buffer; a rank has two to send and two to receive.
            quantize: For copies into FP8; None: there are none.
            device: Of the staging buffers; None: that of the sources, and the host's where there are none.
            share: Ranks of a host read each other's memory, where that is possible.
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
        self._neighbours: Neighbours | None = None
        self._turns: list[list[list[Copy]]] = []
        self._rounds: list[tuple[dict[int, list[Copy]], dict[int, list[Copy]]]] = []
        self._places: list[dict[int, int]] = []
        self._given: dict[tuple[str, Region], Tensor] = {}
        self._found: dict[Copy, Tensor] = {}
        self._staging: list[tuple[Tensor, Tensor]] = []
        self._near: dict[int, list[Tensor]] = {}
        self._read_by: set[int] = set()
        self.num_rounds = 0
        self.written = False

    @property
    def staging_bytes(self) -> int:
        """Bytes of this rank's buffers: none before the first run."""
        return sum(buffer.numel() for pair in self._staging for buffer in pair)

    def run(self, sink: Sink, prove: Callable[[int], object] | None = None) -> int:
        """Collective over the job: hands everything that this rank is to get to `sink`.

        Args:
            sink: Takes it.
            prove: Called last, with the sum that is returned; raises where it is not what arrived.

        Returns:
            `bit_sum` of all elements handed over, as their sources had them, modulo 2^64.

        Raises:
            RuntimeError: On every rank, where any rank failed; the message names that rank, the round and tensors.
        """
        work = Work()
        neighbours = self._ready()
        self.written = True
        self._given, self._found = {}, {}
        flying: list[dist.Work] = []
        for number in range(-1, self.num_rounds):  # the round whose messages are on their way
            following: list[dist.Work] = []
            if number + 1 < self.num_rounds:
                work.attempt(self._pack_round, number + 1)
                if any_rank(work.error is not None):
                    _wait(flying)
                    raise_together(work.error)
                following = self._post(number + 1)
                work.attempt(self._unpack_near, number + 1, sink)
            for bucket in self._turns[number + 1]:
                work.attempt(self._copy, bucket, sink)
            _wait(flying)
            if number >= 0:
                work.attempt(self._unpack_round, number, sink)
            flying = following
        if neighbours.copies:
            work.attempt(self._tell, neighbours)
            raise_together(work.error)
            work.attempt(self._compare, neighbours)
        if prove is not None:
            work.attempt(prove, work.total % MODULUS)
        raise_together(work.error)
        return work.total % MODULUS

    def _ready(self) -> Neighbours:
        """Collective over the job, after which no rank's tensors change: who reads whose, found anew if one moved."""
        known = self._neighbours
        if known is None or (known.copies and any_rank(not known.stayed())):
            known = self._neighbours = Neighbours(self._copies, self._sources, self._rank)
            if self._between:
                known.find(show=self._share, look=self._share and self._device.type == "cpu")
            self._sort(known)
        return known

    def _sort(self, neighbours: Neighbours) -> None:
        """Collective over the job: what is copied by this rank itself, and what goes in messages, by round."""
        read = set(neighbours.copies)
        by_message = [copy for copy in self._copies if copy.source_rank != copy.target_rank and copy not in read]
        mine = (copy for copy in self._copies if copy.target_rank == self._rank)
        own = [copy for copy in mine if copy.source_rank == self._rank or copy in read]
        batches = rounds(by_message, round_bytes(by_message, self._bucket_bytes))
        self._turns = turns(own, self._rank, batches, self._bucket_bytes)
        self._rounds = [by_peer(batch, self._rank) for batch in batches]
        self._places = [places(batch, self._rank) for batch in batches]
        self._staging, self._near, self._read_by = [], {}, set()
        self.num_rounds = len(batches)
        if batches:
            self._prepare()

    def _tell(self, neighbours: Neighbours) -> None:
        """The sums of what others read here: those of this rank's own copies where they are the same."""
        totals = []
        for copy in neighbours.given():
            part = copy.source_name, copy.source_region
            if part not in self._given:
                self._given[part] = sum_bits(self._source(copy))
            totals.append(self._given[part])
        neighbours.tell(totals)

    def _compare(self, neighbours: Neighbours) -> None:
        """What this rank read of others with what they say."""
        for copy, sent in neighbours.told():
            found = int(self._found[copy])
            if sent != found:
                item = WeightSlice(copy.target_name, copy.target_region, neighbours.values(copy))
                raise RuntimeError(f"read from rank {copy.source_rank}: {difference(item, sent, found)}")

    def _prepare(self) -> None:
        """Collective over the job: allocates the buffers, and finds out who reads whose."""
        with together():
            sends, offers = self._allocate_sends()
        try:
            world = dist.get_world_size()
            everyones: list[list[shared_memory.Offer]] = [[] for _ in range(world)]
            dist.all_gather_object(everyones, offers)
            for peer in {peer for _, receives in self._rounds for peer in receives}:
                self._look_for(peer, everyones[peer])
            readers: list[set[int]] = [set() for _ in range(world)]
            dist.all_gather_object(readers, set(self._near))
        finally:
            for offer in offers:
                offer.withdraw()
        self._read_by = {peer for peer, read in enumerate(readers) if self._rank in read}
        with together():
            receives = [
                torch.empty(self._most_bytes(first, 1), dtype=torch.uint8, device=self._device)
                for first in range(NUM_BUFFERS)
            ]
        self._staging = list(zip(sends, receives, strict=True))

    def _allocate_sends(self) -> tuple[list[Tensor], list[shared_memory.Offer]]:
        on_host = self._device.type == "cpu"
        made = [
            shared_memory.create(self._most_bytes(n, 0) if on_host else 0, share=self._share)
            for n in range(NUM_BUFFERS)
        ]
        sends = [send for send, _ in made]
        if not on_host:
            sends = [
                torch.empty(self._most_bytes(first, 0), dtype=torch.uint8, device=self._device)
                for first in range(NUM_BUFFERS)
            ]
        return sends, [offer for _, offer in made]

    def _look_for(self, peer: int, offers: Sequence[shared_memory.Offer]) -> None:
        """Makes a sender near whose buffers this rank can read, all of those in which there is something for it."""
        if not self._share or self._device.type != "cpu":
            return
        found = []
        for first, offer in enumerate(offers):
            wanted = any(peer in receives for _, receives in self._rounds[first::NUM_BUFFERS])
            buffer = shared_memory.attach(offer) if wanted else torch.empty(0, dtype=torch.uint8)
            if buffer is None:
                return
            found.append(buffer)
        self._near[peer] = found

    def _most_bytes(self, first: int, way: int) -> int:
        """Largest buffer, to send (`way` 0) or to receive (1), of every `NUM_BUFFERS`-th round from `first` on."""
        turns = self._rounds[first::NUM_BUFFERS]
        far = [[copies for peer, copies in peers[way].items() if way == 0 or peer not in self._near] for peers in turns]
        return max((sum(map(message_bytes, messages)) for messages in far), default=0)

    def _messages(self, number: int, way: int) -> dict[int, Tensor]:
        """Peer -> its part of the round's buffer; `way` is 0 to send and 1 to receive, from those that are not near."""
        buffer = self._staging[number % NUM_BUFFERS][way]
        found, offset = {}, 0
        for peer, copies in self._rounds[number][way].items():
            if way == 0 or peer not in self._near:
                size = message_bytes(copies)
                found[peer] = buffer[offset : offset + size]
                offset += size
        return found

    def _pack_round(self, number: int) -> int:
        sends = self._rounds[number][0]
        for peer, message in self._messages(number, 0).items():
            self._pack(sends[peer], message)
        return 0

    def _post(self, number: int) -> list[dist.Work]:
        """Starts all messages of a round at the same time, but for those that are read where they are."""
        tag = number % NUM_BUFFERS
        operations = [
            dist.P2POp(call, message, peer, tag=tag)
            for way, call in ((1, dist.irecv), (0, dist.isend))
            for peer, message in self._messages(number, way).items()
            if way == 1 or peer not in self._read_by
        ]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def _unpack_round(self, number: int, sink: Sink) -> int:
        """What came through sockets."""
        return sum(self._unpack(number, peer, message, sink) for peer, message in self._messages(number, 1).items())

    def _unpack_near(self, number: int, sink: Sink) -> int:
        """What lies in other ranks' buffers, which all have packed; it is read before the ranks agree again."""
        receives, total = self._rounds[number][1], 0
        for peer, buffers in self._near.items():
            if peer in receives:
                start = self._places[number][peer]
                message = buffers[number % NUM_BUFFERS][start : start + message_bytes(receives[peer])]
                total += self._unpack(number, peer, message, sink)
        return total

    def _source(self, copy: Copy) -> Tensor:
        """What is to be copied: a view in the stored dtype, or its values in FP8."""
        if copy.source_rank != self._rank and self._neighbours is not None:
            return self._neighbours.values(copy)
        values = self._sources[copy.source_name].detach()[slices(copy.source_region)]
        return values if self._quantize is None or copy.wire_dtype != FP8 else self._quantize(copy, values)

    def _copy(self, bucket: Sequence[Copy], sink: Sink) -> int:
        """Copies by this rank itself: whole, or in parts where each is cast."""
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
            if item.given is not None:
                self._note(copy, item.given)
        return total + sum_of_plain

    def _note(self, copy: Copy, total: Tensor) -> None:
        """Keeps the sum of the bits that a copy read."""
        if copy.source_rank == self._rank:
            self._given[copy.source_name, copy.source_region] = total
        else:
            self._found[copy] = total

    def _cast(self, copy: Copy, sink: Sink) -> int:
        """A copy into another dtype; of what another rank holds it adds up the bits that it reads."""
        total, read = 0, torch.zeros((), dtype=torch.int64)
        for part in copy.parts(_CAST_BYTES):
            values = self._source(part)
            if copy.source_rank != self._rank:
                read = read + sum_bits(values)
            total += self._deliver([part], [values], None, "copy", sink)[1]
        if copy.source_rank != self._rank:
            self._note(copy, read)
        return total

    def _dtype(self, copy: Copy) -> torch.dtype:
        return DTYPES[self._target_dtypes[copy.target_name]]

    def _deliver(
        self, copies: Sequence[Copy], values: Sequence[Tensor], sent: Tensor | None, where: str, sink: Sink
    ) -> tuple[list[WeightSlice], int]:
        """Casts, hands over, and compares.

        Args:
            copies: Whose.
            values: Of each.
            sent: `bits` of each as the sender found it; None: this rank reads them first.
            where: For messages.
            sink: Takes them.

        Returns:
            (what was handed over, sum of it).
        """
        items = []
        for number, (copy, data) in enumerate(zip(copies, values, strict=True)):
            given = None if sent is None else sent[number]
            dtype = self._dtype(copy)
            if data.dtype != dtype:
                arrived = WeightSlice(copy.target_name, copy.target_region, data, given)
                if given is not None and int(bits(data)) != int(given):
                    raise RuntimeError(f"{where}: {difference(arrived, int(given), int(bits(data)))}")
                data, given = data.to(dtype), None
            items.append(WeightSlice(copy.target_name, copy.target_region, data, given))
        total, written = hand_over(items, sink, where)
        self.written &= written
        return items, total

    def _pack(self, copies: Sequence[Copy], message: Tensor) -> None:
        """Fills a message: the copies' bytes, then their sums."""
        parts, sums = parts_of(copies, message)
        for number, (copy, part) in enumerate(zip(copies, parts, strict=True)):
            sums[number] = copy_bits(part, self._source(copy))[1]

    def _unpack(self, number: int, peer: int, message: Tensor, sink: Sink) -> int:
        """Delivers a message, which compares its sums."""
        copies = self._rounds[number][1][peer]
        parts, sums = parts_of(copies, message)
        where = f"round {number + 1} of {self.num_rounds}, message from rank {peer}"
        return self._deliver(copies, parts, sums, where, sink)[1]


def _wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()
