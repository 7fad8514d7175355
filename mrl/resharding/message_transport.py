"""Messages between ranks: one per pair of ranks and round, read in shared memory of the host or sent point to point.

A message contains the parts of its copies, each starting at a multiple of a word, then one checksum per part. Sender
and receiver derive the layout from the same copies, so a message has no header. A sender's messages of a round lie one
after the other in one of its send buffers; rounds alternate between `NUM_BUFFERS` of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.distributed import shared_memory
from mrl.distributed.collectives import raise_on_all_ranks
from mrl.resharding.buckets import NUM_BUFFERS
from mrl.resharding.copy_op import Copy
from mrl.resharding.dtypes import DTYPES

_WORD = 8
"""Alignment of the parts of a message and size of a checksum, bytes."""

_SEND, _RECEIVE = 0, 1


@dataclass(frozen=True)
class TransferMessage:
    """One message of a round.

    Attributes:
        peer: The rank at the other end.
        copies: Copies whose parts it contains.
        data: Bytes of the message, uint8; a view of a staging buffer.
    """

    peer: int
    copies: Sequence[Copy]
    data: Tensor

    def parts(self) -> tuple[list[Tensor], Tensor]:
        """Returns views of the data: one per copy, in its wire dtype and shape, and the checksums [copies]."""
        parts, offset = [], 0
        for copy in self.copies:
            shape = [stop - start for start, stop in copy.target_region]
            part = self.data[offset : offset + copy.num_bytes].view(DTYPES[copy.wire_dtype]).view(shape)
            parts.append(part)
            offset += _aligned(copy.num_bytes)
        return parts, self.data[offset:].view(torch.int64)


class MessageTransport:
    """Staging buffers of one rank and the exchange of their messages; runs its rounds any number of times.

    In each round: fill `outgoing`, agree with all ranks that all have done so, then `send`, read `shared` before the
    next agreement, wait for the works of `send`, and read `received`.

    Attributes:
        num_rounds: Rounds of messages, equal on all ranks.
        rounds: One pair per round: (receiver -> copies that this rank sends it, sender -> copies that this rank
            gets from it).
        buffers: `NUM_BUFFERS` pairs of a send and a receive buffer, uint8; empty without rounds.
    """

    def __init__(self, batches: Sequence[Sequence[Copy]], rank: int, device: torch.device, *, share: bool) -> None:
        """Collective over the job unless there are no rounds: allocates the buffers and maps those of peers.

        Args:
            batches: Rounds of the copies that go in messages, the same on each rank.
            rank: Global rank of this process.
            device: Device of the staging buffers.
            share: Let ranks of the host read each other's send buffers where possible.
        """
        self.num_rounds = len(batches)
        self.rounds = [_by_peer(batch, rank) for batch in batches]
        self.buffers: list[tuple[Tensor, Tensor]] = []
        self._device = device
        self._share = share
        self._offsets = [_message_offsets(batch, rank) for batch in batches]
        self._mapped: dict[int, list[Tensor]] = {}  # sender -> its send buffers in shared memory
        self._readers: set[int] = set()  # receivers that read this rank's send buffers in shared memory
        if batches:
            self._set_up(rank)

    def close(self) -> None:
        """Releases the buffers."""
        self.buffers, self._mapped = [], {}

    def outgoing(self, number: int) -> list[TransferMessage]:
        """Returns the messages that this rank has to fill in a round."""
        return self._messages(number, _SEND)

    def send(self, number: int) -> list[dist.Work]:
        """Starts all sends and receives of a round together, except messages that are read in shared memory."""
        tag = number % NUM_BUFFERS
        operations = [
            dist.P2POp(call, message.data, message.peer, tag=tag)
            for direction, call in ((_RECEIVE, dist.irecv), (_SEND, dist.isend))
            for message in self._messages(number, direction)
            if direction == _RECEIVE or message.peer not in self._readers
        ]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def received(self, number: int) -> list[TransferMessage]:
        """Returns the messages of a round that were sent to this rank."""
        return self._messages(number, _RECEIVE)

    def shared(self, number: int) -> Iterator[TransferMessage]:
        """Yields the messages of a round that this rank reads in shared memory."""
        receives = self.rounds[number][_RECEIVE]
        for peer, buffers in self._mapped.items():
            if peer in receives:
                start = self._offsets[number][peer]
                data = buffers[number % NUM_BUFFERS][start : start + _message_bytes(receives[peer])]
                yield TransferMessage(peer, receives[peer], data)

    def _messages(self, number: int, direction: int) -> list[TransferMessage]:
        """Returns the messages in the round's buffer; those read in shared memory are not received."""
        buffer = self.buffers[number % NUM_BUFFERS][direction]
        found, offset = [], 0
        for peer, copies in self.rounds[number][direction].items():
            if direction == _SEND or peer not in self._mapped:
                size = _message_bytes(copies)
                found.append(TransferMessage(peer, copies, buffer[offset : offset + size]))
                offset += size
        return found

    def _set_up(self, rank: int) -> None:
        """Collective over the job: allocates the buffers and determines which ranks can map which of them."""
        with raise_on_all_ranks():
            sends, offers = self._allocate_sends()
        try:
            world = dist.get_world_size()
            all_offers: list[list[shared_memory.SharedBufferHandle]] = [[] for _ in range(world)]
            dist.all_gather_object(all_offers, offers)
            for peer in {peer for _, receives in self.rounds for peer in receives}:
                self._map(peer, all_offers[peer])
            mapped_by_rank: list[set[int]] = [set() for _ in range(world)]
            dist.all_gather_object(mapped_by_rank, set(self._mapped))
        finally:
            for offer in offers:
                offer.close()
        self._readers = {peer for peer, mapped in enumerate(mapped_by_rank) if rank in mapped}
        with raise_on_all_ranks():
            receives = [self._empty(first, _RECEIVE) for first in range(NUM_BUFFERS)]
        self.buffers = list(zip(sends, receives, strict=True))

    def _allocate_sends(self) -> tuple[list[Tensor], list[shared_memory.SharedBufferHandle]]:
        on_host = self._device.type == "cpu"
        made = [
            shared_memory.create_buffer(self._buffer_bytes(first, _SEND) if on_host else 0, share=self._share)
            for first in range(NUM_BUFFERS)
        ]
        sends = [send if on_host else self._empty(first, _SEND) for first, (send, _) in enumerate(made)]
        return sends, [offer for _, offer in made]

    def _empty(self, first: int, direction: int) -> Tensor:
        return torch.empty(self._buffer_bytes(first, direction), dtype=torch.uint8, device=self._device)

    def _map(self, peer: int, offers: Sequence[shared_memory.SharedBufferHandle]) -> None:
        """Maps a sender's buffers, if all of those with messages for this rank can be mapped."""
        if not self._share or self._device.type != "cpu":
            return
        found = []
        for first, offer in enumerate(offers):
            wanted = any(peer in receives for _, receives in self.rounds[first::NUM_BUFFERS])
            buffer = shared_memory.attach(offer) if wanted else torch.empty(0, dtype=torch.uint8)
            if buffer is None:
                return
            found.append(buffer)
        self._mapped[peer] = found

    def _buffer_bytes(self, first: int, direction: int) -> int:
        """Returns the size of the buffer that serves every `NUM_BUFFERS`-th round from `first` on."""
        sizes = [
            sum(
                _message_bytes(copies)
                for peer, copies in by_direction[direction].items()
                if direction == _SEND or peer not in self._mapped
            )
            for by_direction in self.rounds[first::NUM_BUFFERS]
        ]
        return max(sizes, default=0)


def _by_peer(copies: Sequence[Copy], rank: int) -> tuple[dict[int, list[Copy]], dict[int, list[Copy]]]:
    """Returns (receiver -> copies that `rank` sends it, sender -> copies that `rank` gets from it), in their order."""
    sends: dict[int, list[Copy]] = {}
    receives: dict[int, list[Copy]] = {}
    for copy in copies:
        if copy.source_rank == rank:
            sends.setdefault(copy.target_rank, []).append(copy)
        if copy.target_rank == rank:
            receives.setdefault(copy.source_rank, []).append(copy)
    return sends, receives


def _message_offsets(copies: Sequence[Copy], rank: int) -> dict[int, int]:
    """Returns sender -> offset in bytes, in the sender's buffer, of its message to `rank`."""
    sent: dict[int, dict[int, list[Copy]]] = {}
    senders = {copy.source_rank for copy in copies if copy.target_rank == rank}
    for copy in copies:
        if copy.source_rank in senders:
            sent.setdefault(copy.source_rank, {}).setdefault(copy.target_rank, []).append(copy)
    found = {}
    for sender, messages in sent.items():
        offset = 0
        for receiver, parts in messages.items():
            if receiver == rank:
                found[sender] = offset
            offset += _message_bytes(parts)
    return found


def _message_bytes(copies: Sequence[Copy]) -> int:
    """Returns the size of a message with these copies, checksums included."""
    return sum(_aligned(copy.num_bytes) + _WORD for copy in copies)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _WORD) * _WORD
