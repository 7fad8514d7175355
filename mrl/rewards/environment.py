"""What the environment of an episode rewarded: the sum over its turns."""

from __future__ import annotations

from typing import Any

ENVIRONMENT_REWARD = "environment_reward"
"""Its key in `extra`, which the episode sets."""

IN_PROCESS = True


def environment(*, prompt: str, response: str, answer: str | None, extra: dict[str, Any]) -> float:
    """The environment's own rewards.

    Raises:
        ValueError: The sample is no episode (`rollout.multi_turn.enable`).
    """
    if ENVIRONMENT_REWARD not in extra:
        raise ValueError("the sample is no episode, so that no environment rewarded it")
    return float(extra[ENVIRONMENT_REWARD])


REWARD = environment
