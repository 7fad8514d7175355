"""Placeholder engine for ranks that generate nothing."""

from __future__ import annotations

from collections.abc import Sequence

from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.resharding.layout import Layout
from mrl.resharding.weight_slice import WeightSlice
from mrl.types import Prompt, Rollout


class NullEngine(RolloutEngine):
    """Stores no weights and generates nothing; takes part in weight sync so that its `policy_version` stays current."""

    def layout(self) -> Layout:
        """Returns no tensors."""
        return {}

    def begin_update(self) -> None:
        """Resets the version."""
        self.policy_version = -1

    def update_weights(self, bucket: Sequence[WeightSlice]) -> None:
        """Checks that the bucket is empty.

        Raises:
            RuntimeError: The bucket contains a slice.
        """
        if bucket:
            raise RuntimeError(f"'{bucket[0].name}' was sent to a rank without an engine")

    def checksum(self) -> int:
        """Returns 0."""
        return 0

    def finish_update(self, policy_version: int) -> None:
        """Sets the version."""
        self.policy_version = policy_version

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        """Returns no rollouts."""
        return []

    def sleep(self) -> None:
        """Does nothing."""

    def wake(self) -> None:
        """Does nothing."""

    def stats(self) -> dict[str, float]:
        """Returns no statistics."""
        return {}

    def close(self) -> None:
        """Does nothing."""
