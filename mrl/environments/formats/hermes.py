"""Hermes, and Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Source: NousResearch's Hermes function calling. Parses as vLLM's `hermes` parser does, except that tags inside the JSON
are part of it.
"""

from __future__ import annotations

from mrl.environments.formats.base import Call, CallError, Format, Scanner, parse_json_at, shown, to_tool_call

START, END = "<tool_call>", "</tool_call>"

_WHITESPACE = " \t\n\r"


class Hermes(Scanner):
    """Parser of calls that are JSON objects between tags; the last call may lack its closing tag."""

    opening = START

    _has_end = True
    """False once no closing tag follows, to avoid searching again: parsing time stays linear."""

    def call_at(self, start: int, visible: int) -> tuple[Call | None, int]:
        """Implements `Scanner.call_at`."""
        text, first = self.text, self._next_char(start + len(START))
        error: CallError
        try:
            value, end = parse_json_at(text, first)
            rest = self._next_char(end)
            if rest == len(text) or text.startswith(START, rest):
                return to_tool_call(value, "arguments"), rest
            if text.startswith(END, rest):
                return to_tool_call(value, "arguments"), rest + len(END)
            error = CallError(f"a tool call is no JSON (unexpected text after it: {shown(text[rest : rest + 100])!r})")
        except CallError as refusal:
            error = refusal
        end = text.find(END, first) if self._has_end else -1
        self._has_end = end >= 0
        return error, end + len(END) if self._has_end else len(text)

    def _next_char(self, place: int) -> int:
        """Returns the index of the first non-white-space character from `place` on."""
        while place < len(self.text) and self.text[place] in _WHITESPACE:
            place += 1
        return place


FORMAT = Format(Hermes)
