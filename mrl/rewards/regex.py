"""Format reward: checks whether a regular expression matches the response.

The pattern is applied to the complete response with its reasoning, so that it can require the reasoning tags.
"""

from __future__ import annotations

import re
from typing import Any

from mrl.rewards._arguments import check_finite

IN_PROCESS = False  # a pattern may take exponential time on a response


def regex(
    *,
    prompt: str,
    response: str,
    answer: str | None,
    extra: dict[str, Any],
    pattern: str,
    whole: bool = False,
    correct: float = 1.0,
    wrong: float = 0.0,
) -> float:
    """Searches for a pattern in the response; "." matches newlines too.

    Args:
        prompt: Not used.
        response: Text without the end token.
        answer: Not used.
        extra: Not used.
        pattern: Python regular expression.
        whole: True if the pattern must match the entire response, not a part.
        correct: Score of a match.
        wrong: Score without a match.
    """
    compiled = re.compile(pattern, re.DOTALL)
    match = compiled.fullmatch(response) if whole else compiled.search(response)
    return wrong if match is None else correct


def check(*, pattern: str, correct: float = 1.0, wrong: float = 0.0, **others: Any) -> None:
    """Raises ValueError if the pattern does not compile."""
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"pattern={pattern!r:.80} is not a valid regular expression: {error}") from error
    check_finite(correct=correct, wrong=wrong)


CHECK = check
REWARD = regex
