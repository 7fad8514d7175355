"""The interface of a reward function, and how several become one number.

A reward is a file in this folder that defines `REWARD`, or any importable function of the same signature. Nothing here
runs model output; scoring with time limits is in `scorer.py`.
"""

from __future__ import annotations

from typing import Any, Protocol


class RewardFunction(Protocol):
    """Scores one response.

    `prompt` and `response` are text, `answer` is the ground truth (None where the data has none), `extra` holds the other
    columns of the data row and the keys "response_length" (tokens) and "finish_reason"; keyword arguments come from the
    config's `kwargs`. Returns a finite number.
    """

    def __call__(
        self, *, prompt: str, response: str, answer: str | None, extra: dict[str, Any], **kwargs: Any
    ) -> float:
        """The reward of one response."""
        ...
