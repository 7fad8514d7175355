"""Append-only record of an episode's response tokens.

Sampled and observed tokens are stored in the order the model saw them and are never rendered or tokenized again. At the
end they must equal the engine's sequence, which is trained on (`check`).
"""

from __future__ import annotations

from collections.abc import Sequence

from mrl.types import Rollout


class Ledger:
    """Response tokens of one episode.

    Attributes:
        limit: Maximum number of tokens, `rollout.response_length`.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._ids: list[int] = []
        self._mask: list[bool] = []

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids so far."""
        return tuple(self._ids)

    @property
    def sampled_mask(self) -> tuple[bool, ...]:
        """True for sampled tokens, False for observed ones."""
        return tuple(self._mask)

    def append_sampled(self, ids: Sequence[int]) -> None:
        """Appends a turn of the policy, its end token included.

        Raises:
            ValueError: `ids` is empty or exceeds the limit.
        """
        self._append(ids, sampled=True)

    def append_observed(self, ids: Sequence[int]) -> None:
        """Appends the tokens between two turns of the policy.

        Raises:
            ValueError: `ids` is empty or leaves no room for a sampled token.
        """
        if not self.has_room(len(ids)):
            raise ValueError(
                f"{len(ids)} observed tokens after {len(self)} tokens leave no room for a turn within {self.limit}"
            )
        self._append(ids, sampled=False)

    def has_room(self, num_observed: int) -> bool:
        """Returns whether `num_observed` more tokens fit and leave room for a sampled one."""
        return len(self) + num_observed < self.limit

    def check(self, rollout: Rollout) -> None:
        """Checks that the engine's sequence equals this record.

        Raises:
            RuntimeError: They differ, so the tokens that the engine saw are not those that would be trained on.
        """
        mask = [True] * len(rollout.response_ids) if rollout.sampled_mask is None else rollout.sampled_mask
        if tuple(rollout.response_ids) == self.ids and tuple(mask) == self.sampled_mask:
            return
        pairs = zip(rollout.response_ids, mask, strict=True)
        own = list(zip(self._ids, self._mask, strict=True))
        at = next((i for i, (theirs, mine) in enumerate(zip(pairs, own, strict=False)) if theirs != mine), -1)
        where = f"token {at}" if at >= 0 else f"the length ({len(rollout.response_ids)} and {len(self)})"
        raise RuntimeError(
            f"sample {rollout.sample_index} of prompt {rollout.prompt.source or rollout.prompt.uid}: the engine's "
            f"tokens and the episode's ledger differ in {where}"
        )

    def _append(self, ids: Sequence[int], *, sampled: bool) -> None:
        if not ids or len(self) + len(ids) > self.limit:
            raise ValueError(
                f"{len(ids)} tokens after {len(self)} tokens: expected at least one, and at most {self.limit} in total"
            )
        self._ids += ids
        self._mask += [sampled] * len(ids)
