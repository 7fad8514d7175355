"""What a weight sync hands to its receiver: slices of tensors with new values, and the interface of the receiver.

A rollout engine is the receiver in a run (`mrl/engines/base.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mrl.resharding.checked_copy import copy_bits
from mrl.resharding.layout import Layout, Region
from mrl.resharding.regions import slices


@dataclass(eq=False)
class WeightSlice:
    """New values for `region` of the engine's stored tensor `name`, in the stored dtype.

    Attributes:
        name: Name of the stored tensor.
        region: The part of the tensor that gets new values.
        data: The values, in the stored dtype; valid until `update_weights` returns.
        given: `bits` of the values, as the sender or `write_to` computed them; None: not computed yet.
        written: `bits` of what `write_to` wrote; None before it is called.
    """

    name: str
    region: Region
    data: Tensor
    given: Tensor | None = None
    written: Tensor | None = field(default=None, init=False)

    def write_to(self, stored: Tensor) -> None:
        """Copies the values into their region of `stored` and computes the checksum of what it wrote.

        Raises:
            RuntimeError: Shape or dtype differs from the stored tensor.
        """
        target = stored[slices(self.region)]
        if target.shape != self.data.shape or target.dtype != self.data.dtype:
            raise RuntimeError(
                f"'{self.name}' {self.region}: got {list(self.data.shape)} {self.data.dtype}, "
                f"expected {list(target.shape)} {target.dtype}"
            )
        given, self.written = copy_bits(target, self.data, both=self.given is None)
        self.given = given if self.given is None else self.given


class ReceiverSpec(Protocol):
    """Where a receiver keeps its weights."""

    @property
    def device(self) -> torch.device:
        """Device of the stored tensors."""


class WeightReceiver(Protocol):
    """Stores weights that are replaced in place."""

    policy_version: int
    """Optimizer steps of the actor in the stored weights; -1 before the first sync."""

    @property
    def spec(self) -> ReceiverSpec:
        """Where the weights are."""

    def layout(self) -> Layout:
        """Returns what this rank stores, in Hugging Face coordinates."""

    def begin_update(self) -> None:
        """Starts an update; the stored weights are incomplete until `finish_update`."""

    def update_weights(self, bucket: Sequence[WeightSlice]) -> None:
        """Copies the slices into the stored tensors."""

    def checksum(self) -> int:
        """Returns the order-independent 64-bit sum over the bit patterns of all stored elements."""

    def finish_update(self, policy_version: int) -> None:
        """Ends the update; the stored weights are those of `policy_version`."""
