"""Runs copies between ranks, bucket by bucket, with a checksum on every message.

Owns `Transfer`. Which copies there are is `weights/plan.py`'s business; what happens to arriving data is the caller's:
it hands in a sink (`delivery.py`). A message (`message.py`) is one contiguous buffer per pair of ranks and round (gloo
moves wrong bytes of anything else). It ends in the sums of the bits of its parts, as the sender put them there. Each
must be the sum of what is read back from where the part was written (`WeightSlice.write_to`), so one comparison finds
what was damaged on the way and what was lost at its end. Sums are taken where bytes are copied, while these are in the
cache. Where a sink keeps slices for later, what it was given is added up instead.

Ranks of one host whose buffers are in its memory read each other's messages where they were packed (`shared.py`): no
byte of these goes through a socket.

While the messages of a round are on their way, the next ones are put together, a part of the rank's own copies is made,
and what the last round brought is copied into place. What a sink is given runs through the targets' tensors about in
their order, so that it may wait for whole ones. The buffers for it, two to send and two to receive, are allocated
at the first run and kept.

A failure on one rank reaches all: the ranks agree before each round, so that none waits for a message that never comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.distributed.collectives import raise_together, together
from mrl.engines.base import WeightSlice
from mrl.refit import shared
from mrl.refit.delivery import Sink, difference, hand_over
from mrl.refit.message import by_peer, message_bytes, parts_of, places
from mrl.weights.buckets import NUM_BUFFERS, local_turns, round_bytes, rounds
from mrl.weights.checksum import MODULUS, bits, copy_bits
from mrl.weights.copies import Copy
from mrl.weights.fp8 import DTYPE as FP8
from mrl.weights.regions import slices
from mrl.weights.tensors import DTYPES

_CAST_BYTES = 1 << 20
"""Copies inside a rank that need a cast are made in parts of so many bytes, which stay in the cache."""

Quantize = Callable[[Copy, Tensor], Tensor]
"""(copy, the values of its source) -> what is sent of them in FP8."""


class Transfer:
    """One rank's part of a set of copies, ready to run any number of times.

    Attributes:
        num_rounds: Exchanges between ranks in a run, the same on every rank.
        read_back: Whether everything that this rank got in the last run was read back from where it was written.
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
            share: Ranks of a host read messages from each other's memory, where that is possible.
        """
        self._rank = rank
        self._share = share
        self._sources = sources
        self._device = device or next((tensor.device for tensor in sources.values()), torch.device("cpu"))
        self._target_dtypes = target_dtypes
        self._quantize = quantize
        batches = rounds(copies, round_bytes(copies, bucket_bytes))
        self._local = local_turns(copies, rank, batches, bucket_bytes)
        self._rounds = [by_peer(batch, rank) for batch in batches]
        self._places = [places(batch, rank) for batch in batches]
        self._staging: list[tuple[Tensor, Tensor]] = []
        self._near: dict[int, list[Tensor]] = {}
        self._read_by: set[int] = set()
        self.num_rounds = len(self._rounds)
        self.read_back = False

    @property
    def staging_bytes(self) -> int:
        """Bytes of this rank's buffers: none before the first run."""
        return sum(buffer.numel() for pair in self._staging for buffer in pair)

    def run(self, sink: Sink) -> int:
        """Collective over the job: hands everything that this rank is to get to `sink`.

        Returns:
            `bit_sum` of all elements handed over, as their sources had them, modulo 2^64.

        Raises:
            RuntimeError: On every rank, where any rank failed; the message names that rank, the round and tensors.
        """
        work = _Work()
        if self.num_rounds and not self._staging:
            self._prepare()
        self.read_back = True
        flying: list[dist.Work] = []
        for number in range(-1, self.num_rounds):  # the round whose messages are on their way
            following: list[dist.Work] = []
            if number + 1 < self.num_rounds:
                work.attempt(self._pack_round, number + 1)
                if _any_failed(work.error):
                    _wait(flying)
                    raise_together(work.error)
                following = self._post(number + 1)
                work.attempt(self._unpack_near, number + 1, sink)
            for bucket in self._local[number + 1]:
                work.attempt(self._copy, bucket, sink)
            _wait(flying)
            if number >= 0:
                work.attempt(self._unpack_round, number, sink)
            flying = following
        raise_together(work.error)
        return work.total % MODULUS

    def _prepare(self) -> None:
        """Collective over the job: allocates the buffers, and finds out who reads whose."""
        with together():
            sends, offers = self._allocate_sends()
        try:
            world = dist.get_world_size()
            everyones: list[list[shared.Offer]] = [[] for _ in range(world)]
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

    def _allocate_sends(self) -> tuple[list[Tensor], list[shared.Offer]]:
        on_host = self._device.type == "cpu"
        made = [shared.create(self._most_bytes(n, 0) if on_host else 0, share=self._share) for n in range(NUM_BUFFERS)]
        sends = [send for send, _ in made]
        if not on_host:
            sends = [
                torch.empty(self._most_bytes(first, 0), dtype=torch.uint8, device=self._device)
                for first in range(NUM_BUFFERS)
            ]
        return sends, [offer for _, offer in made]

    def _look_for(self, peer: int, offers: Sequence[shared.Offer]) -> None:
        """Makes a sender near whose buffers this rank can read, all of those in which there is something for it."""
        if not self._share or self._device.type != "cpu":
            return
        found = []
        for first, offer in enumerate(offers):
            wanted = any(peer in receives for _, receives in self._rounds[first::NUM_BUFFERS])
            buffer = shared.attach(offer) if wanted else torch.empty(0, dtype=torch.uint8)
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
        values = self._sources[copy.source_name].detach()[slices(copy.source_region)]
        return values if self._quantize is None or copy.wire_dtype != FP8 else self._quantize(copy, values)

    def _copy(self, bucket: Sequence[Copy], sink: Sink) -> int:
        """Copies inside this rank: whole, or in parts where each is cast."""
        plain, total = [], 0
        for copy in bucket:
            if self._sources[copy.source_name].dtype == self._dtype(copy) or copy.wire_dtype == FP8:
                plain.append(copy)
            else:
                total += sum(
                    self._deliver([part], [self._source(part)], None, "local copy", sink)
                    for part in copy.parts(_CAST_BYTES)
                )
        return total + self._deliver(plain, [self._source(copy) for copy in plain], None, "local copy", sink)

    def _dtype(self, copy: Copy) -> torch.dtype:
        return DTYPES[self._target_dtypes[copy.target_name]]

    def _deliver(
        self, copies: Sequence[Copy], values: Sequence[Tensor], sent: Tensor | None, where: str, sink: Sink
    ) -> int:
        """Casts, hands over, and compares.

        Args:
            copies: Whose.
            values: Of each.
            sent: `bits` of each as the sender found it; None: this rank is the sender.
            where: For messages.
            sink: Takes them.

        Returns:
            Sum of what was handed over.
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
        total, read_back = hand_over(items, sink, where)
        self.read_back &= read_back
        return total

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
        return self._deliver(copies, parts, sums, where, sink)


class _Work:
    """Sums of what was delivered, and the first failure, after which nothing more is tried."""

    def __init__(self) -> None:
        self.total = 0
        self.error: Exception | None = None

    def attempt(self, action: Callable[..., int], *args: object) -> None:
        """Adds what `action` returns."""
        if self.error is None:
            try:
                self.total += action(*args)
            except Exception as caught:  # noqa: BLE001 - the other ranks must hear of any failure
                self.error = caught


def _any_failed(error: Exception | None) -> bool:
    """Collective over the job."""
    flag = torch.tensor([error is not None], dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def _wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()
