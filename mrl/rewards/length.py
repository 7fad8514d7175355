"""Length penalty: 0 up to a target length, decreasing to `-penalty` at a limit."""

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
    """Returns a penalty for response tokens beyond a target.

    Args:
        prompt: Not used.
        response: Not used.
        answer: Not used.
        extra: Mapping with "response_length", tokens including the end token.
        target: Longest response without a penalty, tokens.
        limit: Length from which on the penalty is full, tokens; above `target`.
        penalty: Magnitude of the full penalty.
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
    """Raises ValueError if `limit` is not above `target`, or `shape` is unknown."""
    if target < 0:
        raise ValueError(f"target={target}, expected a number of tokens from 0")
    if limit <= target:
        raise ValueError(f"limit={limit} must be above target={target}")
    if shape not in ("linear", "cosine"):
        raise ValueError(f"shape={shape!r}, expected 'linear' or 'cosine'")
    check_finite(penalty=penalty)


CHECK = check
REWARD = length
