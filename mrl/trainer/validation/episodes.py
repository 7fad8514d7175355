"""Refuses episodes that cannot be, and their fields where there are none.

Owns the rules that `validate.py` asks about `rollout.multi_turn` and `rollout.agent`. Whether the environment can be
made and the chat template appends is found by `episodes.check_environment`. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from mrl.config import registry
from mrl.config.config import Config
from mrl.config.did_you_mean import did_you_mean

REWARD = "environment"
"""Of `reward.functions`: the environment's own."""

FORMATS = "environments.formats"


def episode_rules(config: Config) -> Iterator[str]:
    """A message for each broken rule about episodes."""
    rollout = config.rollout
    turns, agent = rollout.multi_turn, rollout.agent
    if not turns.enable:
        yield from _idle(config)
        return
    if agent.environment is None:
        known = ", ".join(registry.names("environments"))
        yield (
            "rollout.multi_turn.enable=true needs rollout.agent.environment, what the policy talks with: one of "
            f"{known}, or path/to/file.py:Name."
        )
    formats = registry.names(FORMATS)
    if turns.format not in formats:
        yield (
            f"rollout.multi_turn.format={turns.format} is no tool format of this version; it has {', '.join(formats)}."
            f"{did_you_mean(turns.format, formats)}"
        )
    if rollout.enable_rollout_routing_replay:
        yield (
            "rollout.enable_rollout_routing_replay=true with rollout.multi_turn.enable is refused: a later turn reads "
            "the conversation again, and what was chosen for it the first time is not kept. Set "
            "actor.router_replay=recompute or none."
        )
    if not rollout.enable_chunked_prefill and rollout.longest > rollout.max_num_batched_tokens:
        yield (
            f"rollout.enable_chunked_prefill=false with rollout.multi_turn.enable and max_num_batched_tokens="
            f"{rollout.max_num_batched_tokens} is refused: a later turn reads up to {rollout.longest} tokens in one "
            "pass. Raise it to that, or leave rollout.enable_chunked_prefill out."
        )
    if config.algorithm.credit == "turn" and not any(
        function.name == REWARD and function.weight for function in config.reward.functions
    ):
        yield (
            f"algorithm.credit=turn would have no effect because reward.functions has no '{REWARD}': of all rewards "
            "only the environment's are those of a turn. Add it, or leave algorithm.credit out."
        )
    if rollout.ignore_eos:
        yield ("rollout.ignore_eos=true with rollout.multi_turn.enable is refused: no turn would end. Leave it out.")


def _idle(config: Config) -> Iterator[str]:
    for section in ("multi_turn", "agent"):
        given = getattr(config.rollout, section)
        default = type(given)()
        for item in fields(given):
            if getattr(given, item.name) != getattr(default, item.name):
                yield (
                    f"rollout.{section}.{item.name} is set, but would have no effect because rollout.multi_turn.enable "
                    "is false. Remove it, or change that."
                )
    if config.algorithm.credit == "turn":
        yield (
            "algorithm.credit=turn is set, but would have no effect because rollout.multi_turn.enable is false. Remove "
            "it, or turn episodes on."
        )
    if any(function.name == REWARD for function in config.reward.functions):
        yield (
            f"reward.functions has '{REWARD}', but rollout.multi_turn.enable is false: there is no environment that "
            "could reward anything. Name another function, or turn episodes on."
        )
