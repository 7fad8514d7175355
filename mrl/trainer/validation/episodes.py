"""Rules of `rollout.multi_turn` and `rollout.agent`. Imports no torch.

The environment and the chat template themselves are checked by `rollout.episodes.episodes.check_environment`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from mrl.config import registry
from mrl.config.config import Config
from mrl.config.did_you_mean import did_you_mean

REWARD = "environment"
"""Name in `reward.functions` of the reward that the environment gives."""

FORMATS = "environments.formats"


def episode_rules(config: Config) -> Iterator[str]:
    """Yields a message for each broken rule about episodes."""
    rollout = config.rollout
    turns, agent = rollout.multi_turn, rollout.agent
    if not turns.enable:
        yield from _idle(config)
        return
    if agent.environment is None:
        known = ", ".join(registry.names("environments"))
        yield (
            f"rollout.multi_turn.enable=true needs rollout.agent.environment. Set it to one of {known}, or to your own "
            "as path/to/file.py:Name."
        )
    formats = registry.names(FORMATS)
    if turns.format not in formats:
        yield (
            f"rollout.multi_turn.format={turns.format} is unknown; expected one of {', '.join(formats)}."
            f"{did_you_mean(turns.format, formats)}"
        )
    if rollout.enable_rollout_routing_replay:
        yield (
            "rollout.enable_rollout_routing_replay=true is not supported with rollout.multi_turn.enable: a later turn "
            "prefills the conversation again, and the first routing of its tokens is lost. Set "
            "actor.router_replay=recompute or none."
        )
    if not rollout.enable_chunked_prefill and rollout.max_sequence_length > rollout.max_num_batched_tokens:
        yield (
            f"rollout.enable_chunked_prefill=false with rollout.multi_turn.enable needs rollout.max_num_batched_tokens "
            f"of at least {rollout.max_sequence_length}, got {rollout.max_num_batched_tokens}: a later turn prefills "
            "the complete conversation. Raise it, or remove rollout.enable_chunked_prefill."
        )
    if config.algorithm.credit == "turn" and not any(
        function.name == REWARD and function.weight for function in config.reward.functions
    ):
        yield (
            f"algorithm.credit=turn would have no effect because reward.functions has no '{REWARD}', the only reward "
            "that belongs to a turn. Add it, or remove algorithm.credit."
        )
    if rollout.ignore_eos:
        yield "rollout.ignore_eos=true is not supported with rollout.multi_turn.enable: no turn would end. Remove it."


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
            "it, or set rollout.multi_turn.enable=true."
        )
    if any(function.name == REWARD for function in config.reward.functions):
        yield (
            f"reward.functions has '{REWARD}', but there is no environment because rollout.multi_turn.enable is false. "
            "Use another reward function, or set rollout.multi_turn.enable=true."
        )
