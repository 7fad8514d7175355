"""Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, separated by `;`, optionally after `<|python_tag|>`.

Source: Meta's prompt format for Llama 3.1. Parses each call as vLLM's `llama3_json` parser does. If a message does not
begin with an object, only objects with a name are calls; other braces are text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mrl.environments.base import Schema
from mrl.environments.formats.base import Call, CallError, Format, NotJsonError, Scanner, parse_json_at, to_tool_call

_TAG = "<|python_tag|>"

_MAX_MISREAD = 16  # failed parses, each linear in the text's length; after that, braces are text

_FIRST_BRACE = re.compile(r"\s*\{")


class Llama3Json(Scanner):
    """Parser of calls that are JSON objects without enclosing tags."""

    opening = rf"{re.escape(_TAG)}|\{{"

    def __init__(self, text: str, tools: Sequence[Schema]) -> None:
        """Stores the message and the tools' schemas."""
        super().__init__(text, tools)
        self._misread = 0
        self._tag = len(text)
        self._begins: dict[int, bool] = {}

    def call_at(self, start: int, visible: int) -> tuple[Call | None, int]:
        """Implements `Scanner.call_at`."""
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
        meant = self._tag <= start or self._begins[visible]  # the message is a call, even if malformed
        try:
            value, end = parse_json_at(text, start)
        except NotJsonError as error:
            self._misread += 1
            # The end of a malformed call is unknown, so the rest of the text is skipped.
            return (error, len(text)) if meant else (None, max(error.place, start + 1))
        try:
            return to_tool_call(value, "parameters", "arguments"), end
        except CallError as error:
            return error if meant or _has_name(value) else None, end


def _has_name(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


FORMAT = Format(Llama3Json)
