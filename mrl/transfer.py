"""Runs copies between ranks, bucket by bucket, with a checksum on every message.

Owns `Transfer`. Which copies there are is `weights/plan.py`'s business; what happens to arriving data is the caller's:
it hands in a sink. A message is one contiguous buffer per pair of ranks and round (gloo moves wrong bytes of anything
else). It ends in the sender's 64-bit sum; the receiver adds up what arrived and compares.

A failure on one rank reaches all: the ranks agree before each exchange, so that none waits for a message that never
comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.distributed.collectives import raise_together
from mrl.weights.buckets import local_buckets, rounds
from mrl.weights.checksum import MODULUS, bit_sum, word_sum
from mrl.weights.copies import Copy
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
    ) -> None:
        """Sorts the copies into buckets and rounds.

        Args:
            copies: Of all ranks, the same on each.
            sources: This rank's tensors, by the names of its source layout; read at every run.
            target_dtypes: Dtype of each of this rank's targets, as its layout names it.
            rank: This rank.
            bucket_bytes: Largest staging buffer; a rank has one to send and one to receive.
        """
        self._sources = sources
        self._target_dtypes = target_dtypes
        self._local = local_buckets(copies, rank, bucket_bytes)
        self._rounds = [_by_peer(batch, rank) for batch in rounds(copies, bucket_bytes)]
        self.num_rounds = len(self._rounds)

    def run(self, sink: Sink) -> int:
        """Collective over the job: hands everything that this rank is to get to `sink`.

        Returns:
            `bit_sum` of all elements handed over, modulo 2^64.

        Raises:
            RuntimeError: On every rank, where any rank failed; the message names that rank, the round and tensors.
        """
        total = 0
        error: Exception | None = None
        try:
            for bucket in self._local:
                total += self._deliver([(copy, self._source(copy)) for copy in bucket], "local copy", sink)
        except Exception as caught:  # noqa: BLE001 - the other ranks must hear of any failure
            error = caught
        for number, (sends, receives) in enumerate(self._rounds, 1):
            outgoing: dict[int, Tensor] = {}
            try:
                if error is None:
                    outgoing = {peer: self._pack(copies) for peer, copies in sends.items()}
            except Exception as caught:  # noqa: BLE001 - the other ranks must hear of any failure
                error = caught
            raise_together(error)
            incoming = _exchange(outgoing, {peer: self._buffer(copies) for peer, copies in receives.items()})
            try:
                for peer, message in incoming.items():
                    where = f"round {number} of {self.num_rounds}, message from rank {peer}"
                    total += self._unpack(receives[peer], message, where, sink)
            except Exception as caught:  # noqa: BLE001 - the other ranks must hear of any failure
                error = caught
        raise_together(error)
        return total % MODULUS

    def _source(self, copy: Copy) -> Tensor:
        """A view of what is to be copied, in the stored dtype."""
        return self._sources[copy.source_name].detach()[slices(copy.source_region)]

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

    def _buffer(self, copies: Sequence[Copy]) -> Tensor:
        device = next((tensor.device for tensor in self._sources.values()), torch.device("cpu"))
        size = sum(_aligned(copy.num_bytes) for copy in copies) + _WORD
        return torch.empty(size, dtype=torch.uint8, device=device)

    def _pack(self, copies: Sequence[Copy]) -> Tensor:
        """One message: the copies' bytes, then their sum."""
        message = self._buffer(copies)
        for copy, part in zip(copies, _parts(copies, message), strict=True):
            part.copy_(self._source(copy))
        message[-_WORD:].view(torch.int64).copy_(message[:-_WORD].view(torch.int64).sum())
        return message

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


def _exchange(outgoing: Mapping[int, Tensor], incoming: dict[int, Tensor]) -> dict[int, Tensor]:
    """Sends and receives all messages of a round at the same time; returns `incoming`, filled."""
    operations = [dist.P2POp(dist.irecv, message, peer) for peer, message in incoming.items()]
    operations += [dist.P2POp(dist.isend, message, peer) for peer, message in outgoing.items()]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return incoming


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
