# ruff: noqa: RUF001 -- this file matches characters that are not ASCII
r"""Extraction of the final answer of a response: in a box, in answer tags, after ####, or after "the answer is".

Used by `math` and `numeric`. Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mrl.config.boxed import last_boxed

BOX, TAGS, HASHES, SENTENCE = "box", "tags", "hashes", "sentence"

_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?![\s{])([^\s${}\\.,;]+)")
_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\b")
_TAG = re.compile(r"<(/?)(?:final[_ ]?)?(?:answer|ans)>", re.IGNORECASE)
_HASHES = re.compile(r"^[ \t]*####(?!#)[ \t]*(\S.*)$", re.MULTILINE)
_ANNOUNCED = re.compile(
    r"\b(?:answers?|option|choice)\b[^.\n:=]{0,40}?(?:\bis\b|\bare\b|\bequals?\b|:|=)|答案[^。\n:：=]{0,10}?[是为為:：=]",
    re.IGNORECASE,
)
_SAYS_SOMETHING = re.compile(r"[\d$\\]|^\W*[A-Z]\b\W*$")
_END_OF_SENTENCE = re.compile(r"(?<=\S)(?:[.!?](?=\s|$)|[。！？])")
_MAX_SENTENCE_CHARS = 300


@dataclass(frozen=True)
class MarkedAnswer:
    """Part of a response that states its final answer.

    Attributes:
        kind: BOX, TAGS, HASHES or SENTENCE.
        text: Content of that part.
    """

    kind: str
    text: str


def final_answer(text: str) -> MarkedAnswer | None:
    r"""Returns the final answer of a text; None if no form of it is found.

    The first form found is used, in this order: the last closed \boxed{...} or \fbox{...}; the text after
    the last opening answer tag; the last line that begins with ####; the rest of the last sentence "answer ... is",
    preferring sentences with a number, a formula or a letter.

    Args:
        text: Response without its reasoning, or a row's answer.
    """
    if (boxed := last_boxed(text)) is not None:
        return MarkedAnswer(BOX, boxed)
    if _OPEN_BOX.search(text):
        bare = _BARE_BOX.findall(text)
        return MarkedAnswer(BOX, bare[-1] if bare else "")  # an unclosed box was truncated and could read 5 for 58
    if (tagged := _tagged(text)) is not None:
        inner = final_answer(tagged)
        return MarkedAnswer(TAGS, tagged) if inner is None else inner
    if hashed := _HASHES.findall(text):
        return MarkedAnswer(HASHES, hashed[-1])
    announced = [
        _first_sentence(text[found.end() : found.end() + _MAX_SENTENCE_CHARS]) for found in _ANNOUNCED.finditer(text)
    ]
    best = [one for one in announced if _SAYS_SOMETHING.search(one)] or [one for one in announced if one]
    return MarkedAnswer(SENTENCE, best[-1]) if best else None


def _tagged(text: str) -> str | None:
    """Returns the text from the last opening answer tag to its closing tag, or to the end; None without a tag."""
    start, end = None, len(text)
    for tag in _TAG.finditer(text):
        if not tag[1]:
            start, end = tag.end(), len(text)
        elif start is not None and end == len(text):
            end = tag.start()
    return None if start is None else text[start:end]


def _first_sentence(text: str) -> str:
    text = text.strip(" \t\n*:").partition("\n")[0]
    end = _END_OF_SENTENCE.search(text)
    return text if end is None else text[: end.start()]
