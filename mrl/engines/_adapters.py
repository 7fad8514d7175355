"""Low-rank adapters that an engine stores beside the model's weights: where a weight sync writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from mrl.resharding.checksum import MODULUS, bit_sum
from mrl.resharding.layout import Layout
from mrl.resharding.weight_slice import ReceiverSpec, WeightSlice


class _Engine(Protocol):
    """The methods of an engine that an update of its adapters calls."""

    policy_version: int

    @property
    def spec(self) -> ReceiverSpec: ...

    def begin_update(self) -> None: ...

    def finish_update(self, policy_version: int) -> None: ...


class EngineAdapters:
    """Adapters of an engine's rank; a `WeightReceiver`, so that they are synced like weights.

    Args:
        engine: Engine, whose `begin_update` and `finish_update` enclose each update.
        layout: Layout of the adapters, in the coordinates of PEFT's files.
        tensors: Stored adapters by the names of the layout, all zero.
    """

    def __init__(self, engine: _Engine, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
        self._engine, self._layout, self._tensors = engine, layout, tensors

    @property
    def policy_version(self) -> int:
        """Version of the engine's weights and adapters; -1: incomplete."""
        return self._engine.policy_version

    @property
    def spec(self) -> ReceiverSpec:
        """Location of the adapters."""
        return self._engine.spec

    def layout(self) -> Layout:
        """Returns the layout of this rank's adapters."""
        return self._layout

    def begin_update(self) -> None:
        """Starts an update and drops cached prefixes."""
        self._engine.begin_update()

    def update_weights(self, bucket: Sequence[WeightSlice]) -> None:
        """Copies the slices into the stored adapters."""
        for item in bucket:
            item.write_to(self._tensors[item.name])

    def fill(self, value: float) -> None:
        """Sets all adapters to a value, within an update, for a test; the next sync must follow."""
        for tensor in self._tensors.values():
            tensor.fill_(value)

    def checksum(self) -> int:
        """Returns the sum modulo 2**64 over the bit patterns of all stored adapters."""
        return sum(bit_sum(self._tensors[name]) for name in self._layout) % MODULUS

    def finish_update(self, policy_version: int) -> None:
        """Ends the update and allows `generate`."""
        self._engine.finish_update(policy_version)
