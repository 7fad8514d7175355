"""1 where the response has a form: a regular expression from the config matches it.

The pattern sees the whole response, with its reasoning: a format reward asks for the tags.
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
    """Looks for a pattern in the response; "." matches line ends too.

    Args:
        prompt: Not used.
        response: Without the end token.
        answer: Not used.
        extra: Not used.
        pattern: Python regular expression.
        whole: The pattern must match the whole response, not a part.
        correct: Value of a match.
        wrong: Value without one.
    """
    compiled = re.compile(pattern, re.DOTALL)
    match = compiled.fullmatch(response) if whole else compiled.search(response)
    return wrong if match is None else correct


def check(*, pattern: str, correct: float = 1.0, wrong: float = 0.0, **others: Any) -> None:
    """Raises ValueError where the pattern does not compile."""
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"pattern={pattern!r:.80} is no regular expression: {error}") from error
    check_finite(correct=correct, wrong=wrong)


CHECK = check
REWARD = regex
