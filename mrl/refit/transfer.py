"""Runs copies between ranks, bucket by bucket, with a checksum on every message.

Owns `Transfer`. Which copies there are is `weights/plan.py`'s business; what happens to arriving data is the caller's:
it hands in a sink. A message is one contiguous buffer per pair of ranks and round (gloo moves wrong bytes of anything
else). It ends in the sender's 64-bit sum; the receiver adds up what arrived and compares.

While the messages of a round are on their way, the next ones are put together, a part of the rank's own copies is made,
and what the last round brought is copied into place. What a sink is given runs through the targets' tensors about in
their order, so that it may wait for whole ones. The buffers for it, two to send and two to receive, are allocated
at the first run and kept.

A failure on one rank reaches all: the ranks agree before each round, so that none waits for a message that never comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.distributed.collectives import raise_together
from mrl.weights.buckets import NUM_BUFFERS, local_turns, round_bytes, rounds
from mrl.weights.checksum import MODULUS, bit_sum, word_sum
from mrl.weights.copies import Copy
from mrl.weights.fp8 import DTYPE as FP8
from mrl.weights.layout import Region
from mrl.weights.regions import slices
from mrl.weights.tensors import DTYPES

_WORD = 8
"""Bytes; each part of a message starts at a multiple of it, and the last word is the sum of the others."""


@dataclass(frozen=True)
class Arrival:
    """New values for a region of a target tensor, in the target's dtype; valid until the sink returns."""

    name: str
    region: Region
    data: Tensor


Sink = Callable[[Sequence[Arrival]], None]

Quantize = Callable[[Copy, Tensor], Tensor]
"""(copy, the values of its source) -> what is sent of them in FP8."""


class Transfer:
    """One rank's part of a set of copies, ready to run any number of times.

    Attributes:
        num_rounds: Exchanges between ranks in a run, the same on every rank.
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
        """
        self._sources = sources
        self._device = device or next((tensor.device for tensor in sources.values()), torch.device("cpu"))
        self._target_dtypes = target_dtypes
        self._quantize = quantize
        batches = rounds(copies, round_bytes(copies, bucket_bytes))
        self._local = local_turns(copies, rank, batches, bucket_bytes)
        self._rounds = [_by_peer(batch, rank) for batch in batches]
        self._staging: list[tuple[Tensor, Tensor]] = []
        self.num_rounds = len(self._rounds)

    @property
    def staging_bytes(self) -> int:
        """Bytes of this rank's buffers: none before the first run."""
        return sum(buffer.numel() for pair in self._staging for buffer in pair)

    def run(self, sink: Sink) -> int:
        """Collective over the job: hands everything that this rank is to get to `sink`.

        Returns:
            `bit_sum` of all elements handed over, modulo 2^64.

        Raises:
            RuntimeError: On every rank, where any rank failed; the message names that rank, the round and tensors.
        """
        work = _Work()
        flying: list[dist.Work] = []
        for number in range(-1, self.num_rounds):  # the round whose messages are on their way
            following: list[dist.Work] = []
            if number + 1 < self.num_rounds:
                work.attempt(self._pack_round, number + 1)
                if _any_failed(work.error):
                    _wait(flying)
                    raise_together(work.error)
                following = self._post(number + 1)
            for bucket in self._local[number + 1]:
                work.attempt(self._copy, bucket, sink)
            _wait(flying)
            if number >= 0:
                work.attempt(self._unpack_round, number, sink)
            flying = following
        raise_together(work.error)
        return work.total % MODULUS

    def _allocate(self, first: int) -> tuple[Tensor, Tensor]:
        """A buffer to send and one to receive, for every `NUM_BUFFERS`-th round from `first` on."""
        turns = self._rounds[first::NUM_BUFFERS]
        sizes = [max((sum(map(_message_bytes, peers[way].values())) for peers in turns), default=0) for way in (0, 1)]
        send, receive = (torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes)
        return send, receive

    def _messages(self, number: int, way: int) -> dict[int, Tensor]:
        """Peer -> its part of the round's buffer; `way` is 0 to send and 1 to receive."""
        buffer = self._staging[number % NUM_BUFFERS][way]
        found, offset = {}, 0
        for peer, copies in self._rounds[number][way].items():
            size = _message_bytes(copies)
            found[peer] = buffer[offset : offset + size]
            offset += size
        return found

    def _pack_round(self, number: int) -> int:
        if not self._staging:
            self._staging = [self._allocate(first) for first in range(NUM_BUFFERS)]
        sends = self._rounds[number][0]
        for peer, message in self._messages(number, 0).items():
            self._pack(sends[peer], message)
        return 0

    def _post(self, number: int) -> list[dist.Work]:
        """Starts all messages of a round at the same time."""
        tag = number % NUM_BUFFERS
        operations = [
            dist.P2POp(call, message, peer, tag=tag)
            for way, call in ((1, dist.irecv), (0, dist.isend))
            for peer, message in self._messages(number, way).items()
        ]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def _unpack_round(self, number: int, sink: Sink) -> int:
        receives, total = self._rounds[number][1], 0
        for peer, message in self._messages(number, 1).items():
            where = f"round {number + 1} of {self.num_rounds}, message from rank {peer}"
            total += self._unpack(receives[peer], message, where, sink)
        return total

    def _source(self, copy: Copy) -> Tensor:
        """What is to be copied: a view in the stored dtype, or its values in FP8."""
        values = self._sources[copy.source_name].detach()[slices(copy.source_region)]
        return values if self._quantize is None or copy.wire_dtype != FP8 else self._quantize(copy, values)

    def _copy(self, bucket: Sequence[Copy], sink: Sink) -> int:
        """Copies inside this rank."""
        return self._deliver([(copy, self._source(copy)) for copy in bucket], "local copy", sink)

    def _deliver(self, values: Sequence[tuple[Copy, Tensor]], where: str, sink: Sink) -> int:
        """Casts, hands over, and returns the sum of what was handed over."""
        arrivals = [
            Arrival(copy.target_name, copy.target_region, data.to(DTYPES[self._target_dtypes[copy.target_name]]))
            for copy, data in values
        ]
        try:
            sink(arrivals)
        except Exception as error:
            raise RuntimeError(f"{where}: writing {_names(copy for copy, _ in values)} failed: {error}") from error
        return sum(bit_sum(arrival.data) for arrival in arrivals)

    def _pack(self, copies: Sequence[Copy], message: Tensor) -> None:
        """Fills a message: the copies' bytes, then their sum."""
        for copy, part in zip(copies, _parts(copies, message), strict=True):
            part.copy_(self._source(copy))
        message[-_WORD:].view(torch.int64).copy_(message[:-_WORD].view(torch.int64).sum())

    def _unpack(self, copies: Sequence[Copy], message: Tensor, where: str, sink: Sink) -> int:
        """Compares checksums, then delivers."""
        arrived, sent = word_sum(message[:-_WORD]), word_sum(message[-_WORD:])
        if arrived != sent:
            raise RuntimeError(
                f"{where}: what arrived adds up to {arrived:016x}, what was sent to {sent:016x}; damaged: "
                f"{_names(copies)}"
            )
        return self._deliver(list(zip(copies, _parts(copies, message), strict=True)), where, sink)


def _names(copies: Iterable[Copy]) -> str:
    """The target tensors, shortened where they are many."""
    names = list(dict.fromkeys(copy.target_name for copy in copies))
    return f"'{names[0]}'" if len(names) == 1 else f"'{names[0]}' to '{names[-1]}' ({len(names)} tensors)"


def _by_peer(copies: Sequence[Copy], rank: int) -> tuple[dict[int, list[Copy]], dict[int, list[Copy]]]:
    """(receiver -> what `rank` sends it, sender -> what `rank` gets from it), in the order of `copies`."""
    sends: dict[int, list[Copy]] = {}
    receives: dict[int, list[Copy]] = {}
    for copy in copies:
        if copy.source_rank == rank:
            sends.setdefault(copy.target_rank, []).append(copy)
        if copy.target_rank == rank:
            receives.setdefault(copy.source_rank, []).append(copy)
    return sends, receives


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


def _message_bytes(copies: Sequence[Copy]) -> int:
    return sum(_aligned(copy.num_bytes) for copy in copies) + _WORD


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _WORD) * _WORD


def _parts(copies: Sequence[Copy], message: Tensor) -> list[Tensor]:
    """Views of a message, one per copy, in its wire dtype and shape."""
    parts, offset = [], 0
    for copy in copies:
        shape = [stop - start for start, stop in copy.target_region]
        part = message[offset : offset + copy.num_bytes].view(DTYPES[copy.wire_dtype]).view(shape)
        parts.append(part)
        offset += _aligned(copy.num_bytes)
    return parts
