"""The record of an episode's tokens, which only grows.

Owns `Ledger`: what was sampled and what was observed, in the order in which the model saw it. Nothing in it is ever
rendered or tokenised again; what it holds at the end must be what is trained (`check`).
"""

from __future__ import annotations

from collections.abc import Sequence

from mrl.types import Rollout


class Ledger:
    """Response tokens of one episode.

    Attributes:
        limit: Most tokens that it may hold.
    """

    def __init__(self, limit: int) -> None:
        """Args: limit: `rollout.response_length`."""
        self.limit = limit
        self._ids: list[int] = []
        self._mask: list[bool] = []

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens so far."""
        return tuple(self._ids)

    @property
    def sampled_mask(self) -> tuple[bool, ...]:
        """True where the token was sampled."""
        return tuple(self._mask)

    def sampled(self, ids: Sequence[int]) -> None:
        """The policy's turn, its end token included.

        Raises:
            ValueError: There is no token, or no room.
        """
        self._append(ids, sampled=True)

    def observed(self, ids: Sequence[int]) -> None:
        """What the environment answered, up to where the policy goes on.

        Raises:
            ValueError: There is no token, or no room for one after them.
        """
        if not self.has_room(len(ids)):
            raise ValueError(f"{len(ids)} observed tokens after {len(self)} leave no room under {self.limit}")
        self._append(ids, sampled=False)

    def has_room(self, num_observed: int) -> bool:
        """Whether so many observed tokens fit, and a sampled one after them."""
        return len(self) + num_observed < self.limit

    def check(self, rollout: Rollout) -> None:
        """Returns where the engine's sequence is this one.

        Raises:
            RuntimeError: It is another: the tokens that the engine saw are not those that would be trained.
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
            raise ValueError(f"{len(ids)} tokens after {len(self)}: expected at least one, and {self.limit} in all")
        self._ids += ids
        self._mask += [sampled] * len(ids)
