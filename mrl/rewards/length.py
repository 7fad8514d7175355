"""Length shaping: 0 up to a target length, then falling to minus the penalty at a limit."""

from __future__ import annotations

import math
from typing import Any

from mrl.rewards._arguments import check_finite

IN_PROCESS = True


def length(
    *,
    prompt: str,
    response: str,
    answer: str | None,
    extra: dict[str, Any],
    target: int,
    limit: int,
    penalty: float = 1.0,
    shape: str = "linear",
) -> float:
    """Penalises the tokens of a response beyond a target.

    Args:
        prompt: Not used.
        response: Not used.
        answer: Not used.
        extra: "response_length" is read, tokens, the end token included.
        target: Longest response without a penalty, tokens.
        limit: The penalty is full from here on, tokens, above `target`.
        penalty: Subtracted at `limit`.
        shape: "linear", or "cosine" (flat at both ends).

    Raises:
        ValueError: `limit` is not above `target`, or `shape` is unknown.
    """
    check(target=target, limit=limit, penalty=penalty, shape=shape)
    part = min(max((int(extra["response_length"]) - target) / (limit - target), 0.0), 1.0)
    if shape == "linear":
        return -penalty * part
    return -penalty * (1 - math.cos(math.pi * part)) / 2


def check(*, target: int, limit: int, penalty: float = 1.0, shape: str = "linear") -> None:
    """Raises ValueError where `limit` is not above `target`, or `shape` is unknown."""
    if target < 0:
        raise ValueError(f"target={target}, expected a number of tokens")
    if limit <= target:
        raise ValueError(f"limit={limit} must be above target={target}")
    if shape not in ("linear", "cosine"):
        raise ValueError(f"shape={shape!r}, expected 'linear' or 'cosine'")
    check_finite(penalty=penalty)


CHECK = check
REWARD = length
