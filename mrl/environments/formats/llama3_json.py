"""Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, several with `;` between, perhaps after `<|python_tag|>`.

Source: Meta's prompt format for Llama 3.1; read as vLLM's `llama3_json` parser does, call by call. In a message that
does not begin with an object, an object is a call where it has a name; other braces are text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mrl.environments.base import Schema
from mrl.environments.formats.base import Call, CallError, Format, NotJsonError, Scanner, call_of, decoded

_TAG = "<|python_tag|>"

_MAX_MISREAD = 16  # braces that do not begin JSON: each costs the length of the text, and later braces are text

_FIRST_BRACE = re.compile(r"\s*\{")


class Llama3Json(Scanner):
    """Calls that are JSON objects, without tags around them."""

    opening = rf"{re.escape(_TAG)}|\{{"

    def __init__(self, text: str, tools: Sequence[Schema]) -> None:
        """See `Scanner`."""
        super().__init__(text, tools)
        self._misread = 0
        self._tag = len(text)
        self._begins: dict[int, bool] = {}

    def call_at(self, start: int, visible: int) -> tuple[Call | None, int]:
        """See `Scanner.call_at`."""
        text = self.text
        if text.startswith(_TAG, start):
            self._tag = min(self._tag, start)
            brace = _FIRST_BRACE.match(text, start + len(_TAG))
            if brace is None:
                return None, start + len(_TAG)
            start = brace.end() - 1
        if self._misread >= _MAX_MISREAD:
            return None, len(text)
        if visible not in self._begins:
            self._begins[visible] = _FIRST_BRACE.match(text, visible) is not None
        meant = self._tag <= start or self._begins[visible]  # the message is a call, even one that cannot be read
        try:
            value, end = decoded(text, start)
        except NotJsonError as error:
            self._misread += 1
            # The end of a call that cannot be read is not known, so nothing after it is one.
            return (error, len(text)) if meant else (None, max(error.place, start + 1))
        try:
            return call_of(value, "parameters", "arguments"), end
        except CallError as error:
            return error if meant or _has_name(value) else None, end


def _has_name(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


FORMAT = Format(Llama3Json)
