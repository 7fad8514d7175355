# ruff: noqa: RUF001 -- characters that are not ASCII are what it is about
r"""Finds the final answer of a response: in a box, in answer tags, after ####, or after "the answer is".

`math` and `numeric` read the same place. Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

BOX, TAGS, HASHES, SENTENCE = "box", "tags", "hashes", "sentence"

_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")
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
class Marked:
    """A part of a response that is marked as its answer.

    Attributes:
        kind: BOX, TAGS, HASHES or SENTENCE.
        text: Content of that part.
    """

    kind: str
    text: str


def final_answer(text: str) -> Marked | None:
    r"""Returns the answer that a text marks, None where it marks none.

    The first of these that the text has counts: the last closed \boxed{...} or \fbox{...}; the text after the last
    opening answer tag; the last line that begins with ####; the rest of the last sentence "answer ... is", of those
    with a number, a formula or a letter if there are any.

    Args:
        text: Response without its reasoning, or a row's answer.
    """
    if (boxed := last_boxed(text)) is not None:
        return Marked(BOX, boxed)
    if _OPEN_BOX.search(text):
        bare = _BARE_BOX.findall(text)
        return Marked(BOX, bare[-1] if bare else "")  # a box that is not closed was cut: 58 may read 5
    if (tagged := _tagged(text)) is not None:
        inner = final_answer(tagged)
        return Marked(TAGS, tagged) if inner is None else inner
    if hashed := _HASHES.findall(text):
        return Marked(HASHES, hashed[-1])
    said = [
        _first_sentence(text[found.end() : found.end() + _MAX_SENTENCE_CHARS]) for found in _ANNOUNCED.finditer(text)
    ]
    best = [one for one in said if _SAYS_SOMETHING.search(one)] or [one for one in said if one]
    return Marked(SENTENCE, best[-1]) if best else None


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last closed \boxed{...} or \fbox{...}, braces balanced; None without one."""
    open_braces: list[tuple[int, bool]] = []
    last: tuple[int, int] | None = None
    for match in _BRACE.finditer(text):
        if match.group() != "}":
            open_braces.append((match.end(), len(match.group()) > 1))
        elif open_braces:
            first, is_boxed = open_braces.pop()
            if is_boxed and (last is None or first > last[0]):
                last = (first, match.start())
    return None if last is None else text[last[0] : last[1]]


def _tagged(text: str) -> str | None:
    """Text between the last opening answer tag and its closing one, or the end; None without a tag."""
    start, end = None, len(text)
    for tag in _TAG.finditer(text):
        if not tag[1]:
            start, end = tag.end(), len(text)
        elif start is not None and end == len(text):
            end = tag.start()
    return None if start is None else text[start:end]


def _first_sentence(said: str) -> str:
    said = said.strip(" \t\n*:").partition("\n")[0]
    end = _END_OF_SENTENCE.search(said)
    return said if end is None else said[: end.start()]
