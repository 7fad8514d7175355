"""Short answers to questions: equality with one of several accepted answers, or the share of common words.

Normalization and F1 are those of SQuAD (Rajpurkar et al., 2016), which Search-R1 and FlashRAG use too.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from typing import Any, Literal

from mrl.config.reasoning import without_reasoning
from mrl.rewards._arguments import check_finite

IN_PROCESS = True

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_OPEN, _CLOSE = "<answer>", "</answer>"

Metric = Literal["em", "f1"]


def qa(
    *,
    prompt: str,
    response: str,
    answer: str | None,
    extra: dict[str, Any],
    metric: Metric = "em",
    require_tags: bool = True,
    correct: float = 1.0,
    wrong: float = 0.0,
) -> dict[str, float | str]:
    """Compares the response's answer with the accepted ones and takes the best match.

    Args:
        prompt: Text of the prompt; it may end with the opening tag of the reasoning.
        response: Text without the end token; its reasoning is ignored. The text in its last <answer> tags is compared.
        answer: A JSON list of accepted answers, or one answer as plain text.
        extra: Not used.
        metric: "em": equal after normalization. "f1": F1 of the words, which scales from `wrong` to `correct`.
        require_tags: True if a response without <answer> tags is wrong; False to compare all of it.
        correct: Score of an equal answer.
        wrong: Score of an answer without a common word.

    Returns:
        "score"; "em" and "f1", numbers in [0, 1]; "pred", the compared text ("" for none).

    Raises:
        ValueError: The row has no accepted answer.
    """
    accepted = [normalize(one) for one in _accepted(answer)]
    text = without_reasoning(response, prompt)
    found = _in_tags(text)
    if found is None:
        found = "" if require_tags else text
    given = normalize(found)
    em = float(given in accepted and bool(given))
    f1 = max(_f1(given, one) for one in accepted)
    share = em if metric == "em" else f1
    return {"score": wrong + (correct - wrong) * share, "em": em, "f1": f1, "pred": found.strip()[:200]}


def normalize(text: str) -> str:
    """Returns a text in lower case without punctuation, articles and repeated white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _accepted(answer: str | None) -> list[str]:
    found: Any = answer
    if answer is not None and answer.lstrip()[:1] in ("[", "{"):
        try:
            found = json.loads(answer)
        except (ValueError, RecursionError):
            found = answer
    if isinstance(found, dict):
        found = found.get("target")  # as in Search-R1's ground truth
    texts = [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, str)]
    texts = [one for one in texts if normalize(one)]
    if not texts:
        raise ValueError(f"the row's answer is {answer!r:.100}, expected a text or a JSON list of texts")
    return texts


def _in_tags(text: str) -> str | None:
    """Returns the text from the last opening tag to its closing tag, or to the end; None without a tag."""
    start = text.rfind(_OPEN)
    return None if start < 0 else text[start + len(_OPEN) :].partition(_CLOSE)[0]


def _f1(given: str, accepted: str) -> float:
    one, other = given.split(), accepted.split()
    common = sum((Counter(one) & Counter(other)).values())
    return 2 * common / (len(one) + len(other)) if common else 0.0


def check(*, correct: float = 1.0, wrong: float = 0.0, **others: Any) -> None:
    """Raises ValueError for a value out of range."""
    check_finite(correct=correct, wrong=wrong)


CHECK = check
REWARD = qa
