"""What a rank has in the engine's place where nothing is sampled, or other ranks do.

Owns `NoEngine`, which takes part in refits as one that stores nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.resharding.layout import Layout
from mrl.resharding.weight_slice import WeightSlice
from mrl.types import Prompt, Rollout


class NoEngine(RolloutEngine):
    """Stores nothing; `policy_version` is that of the engines of the other ranks."""

    def layout(self) -> Layout:
        """Nothing."""
        return {}

    def begin_update(self) -> None:
        """See the base."""
        self.policy_version = -1

    def update_weights(self, bucket: Sequence[WeightSlice]) -> None:
        """Takes nothing.

        Raises:
            RuntimeError: There is something.
        """
        if bucket:
            raise RuntimeError(f"'{bucket[0].name}' was sent to a rank that holds no engine")

    def checksum(self) -> int:
        """Of nothing."""
        return 0

    def finish_update(self, policy_version: int) -> None:
        """See the base."""
        self.policy_version = policy_version

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        """Other ranks do."""
        return []

    def sleep(self) -> None:
        """Nothing to free."""

    def wake(self) -> None:
        """Nothing to make ready."""

    def stats(self) -> dict[str, float]:
        """None."""
        return {}

    def close(self) -> None:
        """Nothing to release."""
