"""State of one episode between the turns.

Each turn has its own random numbers, from the sample and the turn's position in it, so they do not depend on the rest
of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mrl.algorithms.functional.sampling import stream_key
from mrl.engines._multiturn_base import FinishedTurn, SequenceKey
from mrl.types import FinishReason, Prompt, Rollout, SamplingMask

LATER_UID = 1 << 62
"""Smallest uid of a later turn, above the uids of all prompts: a later turn is sampled as a prompt with its own uid."""


@dataclass
class MultiTurnSample:
    """Tokens of one episode so far; `prompt_index` is the index of its prompt in the call."""

    prompt_index: int
    prompt: Prompt
    sample_index: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    kept_tokens: list[SamplingMask] = field(default_factory=list)
    log_kept_mass: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    num_seen: int = 0
    """Tokens in the KV cache when the last turn ended: all but the newest."""

    @property
    def key(self) -> SequenceKey:
        """Identifies the episode in a call."""
        return self.prompt_index, self.sample_index

    def as_prompt(self, seed: int) -> Prompt:
        """Returns the episode so far as the prompt of its next turn."""
        uid = LATER_UID + stream_key(seed, self.prompt.uid, self.sample_index) % LATER_UID
        uid = LATER_UID + stream_key(uid, len(self.ids), 0) % LATER_UID
        return replace(self.prompt, uid=uid, prompt_ids=(*self.prompt.prompt_ids, *self.ids))

    def append_turn(self, rollout: Rollout, room: int) -> FinishedTurn:
        """Appends the first `room` tokens that a turn sampled."""
        ids = rollout.response_ids[:room]
        self.finish_reason = rollout.finish_reason if len(ids) == len(rollout.response_ids) else "length"
        if len(ids) == room and rollout.finish_reason == "length":
            self.finish_reason = "length"
        self.ids += ids
        self.logprobs += rollout.rollout_logprobs[: len(ids)]
        self.mask += [True] * len(ids)
        self.num_seen = len(self.prompt.prompt_ids) + len(self.ids) - 1
        if rollout.kept_tokens is not None:
            self.kept_tokens += rollout.kept_tokens.split([len(ids), len(rollout.response_ids) - len(ids)])[:1]
            self.log_kept_mass += rollout.log_kept_mass[: len(ids)]
        return FinishedTurn(self.prompt_index, self.sample_index, tuple(ids), self.finish_reason)

    def append_reply(self, ids: Sequence[int]) -> None:
        """Appends a reply of the environment."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [False] * len(ids)
        if self.kept_tokens:
            self.kept_tokens.append(SamplingMask.of_observed(len(ids)))
            self.log_kept_mass += [0.0] * len(ids)

    def to_rollout(self, version: int) -> Rollout:
        """Returns the complete episode."""
        return Rollout(
            self.prompt,
            self.sample_index,
            self.ids,
            self.logprobs,
            self.finish_reason,
            version,
            sampled_mask=self.mask,
            kept_tokens=SamplingMask.join(self.kept_tokens) if self.kept_tokens else None,
            log_kept_mass=self.log_kept_mass,
        )
