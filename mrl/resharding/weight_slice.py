"""Slices of tensors with new values, and the interface of the object that stores them.

In a run the receiver is a rollout engine (`mrl/engines/base.py`).
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
        region: Part of the stored tensor that gets new values.
        data: New values, in the stored dtype; valid until `update_weights` returns.
        source_sum: `bits` of the values, as the sender or `write_to` computed them; None: not computed yet.
        written_sum: `bits` of the values that `write_to` wrote; None before it is called.
    """

    name: str
    region: Region
    data: Tensor
    source_sum: Tensor | None = None
    written_sum: Tensor | None = field(default=None, init=False)

    def write_to(self, stored: Tensor) -> None:
        """Copies the values into their region of `stored` and sums the bits that it writes.

        Raises:
            RuntimeError: Shape or dtype differs from the stored tensor.
        """
        target = stored[slices(self.region)]
        if target.shape != self.data.shape or target.dtype != self.data.dtype:
            raise RuntimeError(
                f"'{self.name}' {self.region}: got {list(self.data.shape)} {self.data.dtype}, "
                f"expected {list(target.shape)} {target.dtype}"
            )
        source_sum, self.written_sum = copy_bits(target, self.data, both=self.source_sum is None)
        self.source_sum = source_sum if self.source_sum is None else self.source_sum


class ReceiverSpec(Protocol):
    """Location of a receiver's weights."""

    @property
    def device(self) -> torch.device:
        """Device of the stored tensors."""


class WeightReceiver(Protocol):
    """Interface of an object that stores weights and lets them be replaced in place."""

    @property
    def policy_version(self) -> int:
        """Optimizer steps of the actor in the stored weights; -1 before the first sync."""

    @property
    def spec(self) -> ReceiverSpec:
        """Location of the weights."""

    def layout(self) -> Layout:
        """Returns the layout of this rank's stored tensors, in Hugging Face coordinates."""

    def begin_update(self) -> None:
        """Starts an update; the stored weights are incomplete until `finish_update`."""

    def update_weights(self, bucket: Sequence[WeightSlice]) -> None:
        """Copies the slices into the stored tensors."""

    def checksum(self) -> int:
        """Returns the order-independent 64-bit sum over the bit patterns of all stored elements."""

    def finish_update(self, policy_version: int) -> None:
        """Ends the update; the stored weights are those of `policy_version`."""
