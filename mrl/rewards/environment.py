"""Reward of an episode's environment, summed over the turns."""

from __future__ import annotations

from typing import Any

ENVIRONMENT_REWARD = "environment_reward"
"""Key of the environment's reward in `extra`, set for episodes only."""

IN_PROCESS = True


def environment(*, prompt: str, response: str, answer: str | None, extra: dict[str, Any]) -> float:
    """Returns the environment's reward.

    Raises:
        ValueError: The sample is not an episode (`rollout.multi_turn.enable` is false).
    """
    if ENVIRONMENT_REWARD not in extra:
        raise ValueError("the sample is not an episode and has no environment's reward")
    return float(extra[ENVIRONMENT_REWARD])


REWARD = environment
