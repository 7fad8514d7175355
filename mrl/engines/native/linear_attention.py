"""Gated delta nets of the native engine: the layer, and the states of running sequences that it reads and writes.

A sequence has a recurrent state and the last inputs of the convolution, in its row of the cache. A state contains all
tokens before the next one and cannot be cut to fewer: a row moves and is copied with its state, and a sequence that
begins with part of a row's tokens is computed again.

Shapes: P packed tokens, B decoding sequences (rows 0 .. B-1), C channels, H value heads, K and V dims of a head, W
tokens that the convolution reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from mrl.engines.native.attention import PrefillChunk
from mrl.engines.native.kv_cache import KVCache
from mrl.engines.native.packed_linear import Linear
from mrl.models.base import LinearAttentionSpec
from mrl.models.kernels.delta_rule import (
    Scan,
    convolve,
    delta_rule,
    delta_step,
    gated_norm,
    scan_inputs,
    split_projection,
)


class SequenceStates(Protocol):
    """States of the sequences of one forward, whose packed tokens it gets."""

    def convolve(self, layer: int, mixed_PC: Tensor, weight: Tensor) -> Tensor:
        """Returns the convolution's outputs [P, C] and stores the last inputs of each sequence.

        Args:
            layer: Index among the layers with linear attention.
            mixed_PC: Inputs.
            weight: [C, 1, W].
        """

    def scan(self, layer: int, scan: Scan) -> Tensor:
        """Returns the delta rule's outputs [P, H, V] for inputs [P, ...] and stores each sequence's last state."""


@dataclass(frozen=True)
class DeltaNetLayer:
    """Gated delta net of one layer on this rank.

    Attributes:
        index: Index among the layers with linear attention.
        linear: Sizes of the heads.
        in_proj: Input projection.
        conv: Weight of the convolution, [C, 1, W].
        decay_log: Logarithm of each head's decay rate, [H].
        step_bias: Bias of the time steps, [H].
        norm: Weight of the output's norm, [V].
        eps: Epsilon of the norm.
        o: Output projection.
    """

    index: int
    linear: LinearAttentionSpec
    in_proj: Linear
    conv: Tensor
    decay_log: Tensor
    step_bias: Tensor
    norm: Tensor
    eps: float
    o: Linear

    @property
    def reads(self) -> list[Tensor]:
        """Tensors that a forward reads, without those of the projections."""
        return [self.conv, self.decay_log, self.step_bias, self.norm]

    def mix(self, x_PH: Tensor, states: SequenceStates | None) -> Tensor:
        """Returns the inputs [P, H V] of the output projection.

        Raises:
            ValueError: No states were given.
        """
        if states is None:
            raise ValueError("linear attention needs the states of its sequences")
        projected = split_projection(self.in_proj(x_PH), self.linear)
        convolved = states.convolve(self.index, projected.mixed, self.conv)
        scan = scan_inputs(convolved, projected, self.decay_log, self.step_bias, self.linear)
        return gated_norm(states.scan(self.index, scan), projected.gate, self.norm, self.eps)


class PrefillStates:
    """States of prompt chunks; the packed tokens are those of `chunks` in order.

    A chunk at position 0 begins with zeros, any other with the state of its row, which contains the tokens before it.

    Args:
        cache: Cache with the states.
        chunks: Prompt chunks, sorted by `extent`.
    """

    def __init__(self, cache: KVCache, chunks: Sequence[PrefillChunk]) -> None:
        device = cache.device
        self._cache = cache
        self._parts: list[tuple[int, int, Tensor]] = []
        for (start, stop), members in groupby(chunks, key=lambda chunk: chunk.extent):
            rows = torch.tensor([chunk.row for chunk in members], device=device)
            self._parts.append((start, stop - start, rows))

    def convolve(self, layer: int, mixed_PC: Tensor, weight: Tensor) -> Tensor:
        """See `SequenceStates`."""
        kept, width = self._cache.conv_inputs[layer], weight.size(2)
        outputs, first = [], 0
        for start, count, rows in self._parts:
            last = first + rows.numel() * count
            inputs = mixed_PC[first:last].view(rows.numel(), count, -1)
            before = kept[rows] if start else inputs.new_zeros(rows.numel(), width - 1, inputs.size(2))
            whole = torch.cat([before, inputs], 1)
            kept[rows] = whole[:, whole.size(1) - width + 1 :]
            outputs.append(convolve(whole.unfold(1, width, 1).transpose(-1, -2), weight).flatten(0, 1))
            first = last
        return torch.cat(outputs)

    def scan(self, layer: int, scan: Scan) -> Tensor:
        """See `SequenceStates`."""
        states = self._cache.states[layer]
        outputs, first = [], 0
        for start, count, rows in self._parts:
            last = first + rows.numel() * count
            own = Scan(*(part[first:last].view(rows.numel(), count, *part.shape[1:]) for part in scan))
            output, states[rows] = delta_rule(own, states[rows] if start else None)
            outputs.append(output.flatten(0, 1))
            first = last
        return torch.cat(outputs)


class DecodeStates:
    """States of the first B rows, each of which gets one token.

    Args:
        cache: Cache with the states.
        batch: B.
    """

    def __init__(self, cache: KVCache, batch: int) -> None:
        self._cache, self._batch = cache, batch

    def convolve(self, layer: int, mixed_PC: Tensor, weight: Tensor) -> Tensor:
        """See `SequenceStates`."""
        kept = self._cache.conv_inputs[layer][: self._batch]
        taps = torch.cat([kept, mixed_PC[:, None]], 1)
        kept.copy_(taps[:, 1:])
        return convolve(taps, weight)

    def scan(self, layer: int, scan: Scan) -> Tensor:
        """See `SequenceStates`."""
        states = self._cache.states[layer][: self._batch]
        output, after = delta_step(scan, states)
        states.copy_(after)
        return output


def prefill_states(cache: KVCache, chunks: Sequence[PrefillChunk]) -> SequenceStates | None:
    """Returns the states of prompt chunks, sorted by `extent`; None: no layer has linear attention."""
    return PrefillStates(cache, chunks) if cache.states else None


def decode_states(cache: KVCache, batch: int) -> SequenceStates | None:
    """Returns the states of a decode step of `batch` rows; None: no layer has linear attention."""
    return DecodeStates(cache, batch) if cache.states else None
