"""Conversations by rounds: generate, ask, append, generate again; with any engine that generates.

Owns which conversations go into the next call of `generate`. An engine that keeps prefixes reads only what is new; the
others read the whole conversation again in each round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mrl.engines._multiturn_base import Talk, check_answer
from mrl.engines._multiturn_sample import Conversation
from mrl.types import Prompt, Rollout

Again = Callable[[Sequence[Prompt], int], list[Rollout]]
"""Prompts, and the most tokens of a response -> one sample of each."""


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
    running = [Conversation(at // num_samples, one.prompt, one.sample_index) for at, one in enumerate(first)]
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


def _calls(running: list[Conversation], limit: int, max_len: int) -> Iterator[list[Conversation]]:
    """Consecutive parts in which each fits with the most room that any needs; `running` is put in their order.

    A turn that is sampled beyond its own room is cut, so that the parts change nothing.
    """
    running.sort(key=lambda one: (len(one.ids), one.key))
    part: list[Conversation] = []
    for one in running:
        room = limit - len(part[0].ids) if part else 0
        if part and len(one.prompt.prompt_ids) + len(one.ids) + room > max_len:
            yield part
            part = []
        part.append(one)
    if part:
        yield part
