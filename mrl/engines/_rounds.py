"""Conversations by rounds: generate, ask, append, generate again; with any engine that generates.

Owns what of a conversation goes into the next call of `generate`, and that nothing of it depends on who else is in that
call: each turn has random numbers of its own, by its sample and its place in it. An engine that keeps prefixes reads
only what is new; the others read the whole conversation again in each round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from mrl.engines._talk import Stopped, Talk, check_answer
from mrl.functional.sampling import stream_key
from mrl.types import FinishReason, Prompt, Rollout, Support

Again = Callable[[Sequence[Prompt], int], list[Rollout]]
"""Prompts, and the most tokens of a response -> one sample of each."""

LATER_UID = 1 << 62
"""Above the uids of all prompts: random numbers of a later turn are those of a prompt of its own."""


@dataclass
class _Conversation:
    """One sample so far; `place` is that of its prompt in the call."""

    place: int
    prompt: Prompt
    sample_index: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    supports: list[Support] = field(default_factory=list)
    log_kept_mass: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "stop"

    @property
    def key(self) -> tuple[int, int]:
        return self.place, self.sample_index

    def asked(self, seed: int) -> Prompt:
        """The conversation so far as the prompt of its next turn."""
        uid = LATER_UID + stream_key(seed, self.prompt.uid, self.sample_index) % LATER_UID
        uid = LATER_UID + stream_key(uid, len(self.ids), 0) % LATER_UID
        return replace(self.prompt, uid=uid, prompt_ids=(*self.prompt.prompt_ids, *self.ids))

    def took(self, rollout: Rollout, room: int) -> Stopped:
        """Takes in what was sampled, as much as there is room for."""
        ids = rollout.response_ids[:room]
        self.finish_reason = rollout.finish_reason if len(ids) == len(rollout.response_ids) else "length"
        if len(ids) == room and rollout.finish_reason == "length":
            self.finish_reason = "length"
        self.ids += ids
        self.logprobs += rollout.rollout_logprobs[: len(ids)]
        self.mask += [True] * len(ids)
        if rollout.support is not None:
            self.supports += rollout.support.split([len(ids), len(rollout.response_ids) - len(ids)])[:1]
            self.log_kept_mass += rollout.log_kept_mass[: len(ids)]
        return Stopped(self.place, self.sample_index, tuple(ids), self.finish_reason)

    def heard(self, ids: Sequence[int]) -> None:
        """Takes in what was answered."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [False] * len(ids)
        if self.supports:
            self.supports.append(Support.of_observed(len(ids)))
            self.log_kept_mass += [0.0] * len(ids)

    def ended(self, version: int) -> Rollout:
        """The whole of it."""
        return Rollout(
            self.prompt,
            self.sample_index,
            self.ids,
            self.logprobs,
            self.finish_reason,
            version,
            sampled_mask=self.mask,
            support=Support.join(self.supports) if self.supports else None,
            log_kept_mass=self.log_kept_mass,
        )


def converse(
    first: Sequence[Rollout], again: Again, talk: Talk, *, num_samples: int, seed: int, limit: int, max_len: int
) -> list[Rollout]:
    """Rollouts of whole conversations, see `RolloutEngine.converse`.

    Args:
        first: Of the first turns, `num_samples` of each prompt in order.
        again: Samples a later turn of each of the conversations that it is given.
        talk: Answers.
        num_samples: Of a prompt.
        seed: Of all random numbers.
        limit: Response tokens of a conversation, observed ones included.
        max_len: Tokens of the longest sequence that the engine takes.
    """
    running = [_Conversation(at // num_samples, one.prompt, one.sample_index) for at, one in enumerate(first)]
    every = list(running)
    version = first[0].policy_version if first else 0
    sampled = list(first)
    while running:
        for one, rollout in zip(running, sampled, strict=True):
            talk.ask(one.took(rollout, limit - len(one.ids)))
        answers = talk.answers([one.key for one in running])
        going = []
        for one, answer in zip(running, answers, strict=True):
            if answer is not None:
                one.heard(check_answer(answer, len(one.ids), limit))
                going.append(one)
        running, sampled = going, []
        for members in _calls(running, limit, max_len):
            found = again([one.asked(seed) for one in members], limit - len(members[0].ids))
            if len(found) < len(members):
                return []  # told to stop: nothing of it is used
            sampled += found
    return [one.ended(version) for one in every]


def _calls(running: list[_Conversation], limit: int, max_len: int) -> Iterator[list[_Conversation]]:
    """Consecutive parts in which each fits with the most room that any needs; `running` is put in their order.

    A turn that is sampled beyond its own room is cut, so that the parts change nothing.
    """
    running.sort(key=lambda one: (len(one.ids), one.key))
    part: list[_Conversation] = []
    for one in running:
        room = limit - len(part[0].ids) if part else 0
        if part and len(one.prompt.prompt_ids) + len(one.ids) + room > max_len:
            yield part
            part = []
        part.append(one)
    if part:
        yield part
