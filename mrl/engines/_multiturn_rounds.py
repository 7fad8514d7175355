"""Multi-turn generation in rounds (generate, submit, append the replies, generate again), with any engine.

An engine with a prefix cache prefills only the new tokens of a round, the others the complete episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mrl.engines._multiturn_base import MultiTurnClient, check_reply
from mrl.engines._multiturn_sample import MultiTurnSample
from mrl.types import Prompt, Rollout

Again = Callable[[Sequence[Prompt], int], list[Rollout]]
"""Generates one sample of each prompt, with at most so many response tokens."""


def generate_in_rounds(
    first: Sequence[Rollout],
    generate_turn: Again,
    client: MultiTurnClient,
    *,
    num_samples: int,
    seed: int,
    limit: int,
    max_len: int,
) -> list[Rollout]:
    """Returns the rollouts of complete episodes, see `RolloutEngine.generate_in_rounds`.

    Args:
        first: Rollouts of the first turns, `num_samples` per prompt, in order.
        generate_turn: Samples a later turn of each given episode.
        client: Multi-turn client.
        num_samples: Samples per prompt.
        seed: Seed of the run.
        limit: Most response tokens of an episode, environment tokens included.
        max_len: Longest sequence of the engine, tokens.
    """
    running = [MultiTurnSample(at // num_samples, one.prompt, one.sample_index) for at, one in enumerate(first)]
    every = list(running)
    version = first[0].policy_version if first else 0
    sampled = list(first)
    while running:
        for one, rollout in zip(running, sampled, strict=True):
            client.submit(one.append_turn(rollout, limit - len(one.ids)))
        answers = client.wait_for_replies([one.key for one in running])
        going = []
        for one, answer in zip(running, answers, strict=True):
            if answer is not None:
                one.append_reply(check_reply(answer, len(one.ids), limit))
                going.append(one)
        running, sampled = going, []
        for members in _calls(running, limit, max_len):
            found = generate_turn([one.as_prompt(seed) for one in members], limit - len(members[0].ids))
            if len(found) < len(members):
                return []  # an abort was requested: the partial episodes are discarded
            sampled += found
    return [one.to_rollout(version) for one in every]


def _calls(running: list[MultiTurnSample], limit: int, max_len: int) -> Iterator[list[MultiTurnSample]]:
    """Yields the batches of a round; sorts `running` into their order.

    All sequences of a batch get the room of the one that needs the most, and must fit into `max_len` with it. A turn
    that exceeds its own room is cut afterwards, so the batching does not change the samples.
    """
    running.sort(key=lambda one: (len(one.ids), one.key))
    part: list[MultiTurnSample] = []
    for one in running:
        room = limit - len(part[0].ids) if part else 0
        if part and len(one.prompt.prompt_ids) + len(one.ids) + room > max_len:
            yield part
            part = []
        part.append(one)
    if part:
        yield part
