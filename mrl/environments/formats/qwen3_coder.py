"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

Values are texts, converted to the types of the tool's schema. Source: the chat template of Qwen3-Coder. Parses as
vLLM's `qwen3_coder` parser does, except that tags inside a value are part of it.

The format has no escapes, so a value may contain any of its tags. Only complete sequences of tags count: a call ends
with `</parameter></function></tool_call>`, with optional white space between, and an argument ends with `</parameter>`
before the next `<parameter=`. A value may contain complete calls, such as an example in a document: the end of a call
is found by matching beginnings and ends like brackets.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.config import reasoning
from mrl.environments.base import Schema, ToolCall
from mrl.environments.formats.base import Call, CallError, Format, Scanner, parse_json_at, shown
from mrl.environments.formats.hermes import END, START

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_TAGS = re.compile(
    # A function that follows another may lack its <tool_call> tag.
    rf"(?P<begin>(?:{START}|(?<=</function>))\s*{_FUNCTION})"
    rf"|(?P<end>(?:</parameter>\s*)?</function>(?:\s*{END}|(?=\s*(?:{START}\s*)?{_FUNCTION})|\s*\Z))"
    rf"|{reasoning.MARK}"  # a call that continues after reasoning cannot end before it
)
_EDGE = re.compile(rf"{END}|(?={START})")
_NEXT_PARAMETER = re.compile(rf"</parameter>\s*{_PARAMETER}")
_LAST_PARAMETER_END = re.compile(r"</parameter>\s*\Z")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class _Body:
    """Indices in a message of the part between the beginning and the end of a call.

    Attributes:
        first: Index after `<function=`.
        last: Index of the closing tags.
        end: Index after the closing tags.
        inner: Spans [first, last) of complete calls inside it, in order.
    """

    first: int
    last: int
    end: int
    inner: tuple[tuple[int, int], ...] = ()


class Qwen3Coder(Scanner):
    """Parser of tagged calls; the last call of a message may lack its closing tags."""

    opening = rf"{START}|(?<=</function>)\s*{_FUNCTION}"

    def __init__(self, text: str, tools: Sequence[Schema]) -> None:
        """Finds and matches all tags of the message."""
        super().__init__(text, tools)
        self._tags = _Tags(text)

    def call_at(self, start: int, visible: int) -> tuple[Call | None, int]:
        """Implements `Scanner.call_at`."""
        text = self.text
        body = self._tags.body(start)
        if body is None:
            edge = _EDGE.search(text, start + len(START))
            last = edge.start() if edge else len(text)
            error = CallError(f"a tool call has no '{_FUNCTION}NAME>': {shown(text[start + len(START) : last])}")
            return error, edge.end() if edge else len(text)
        try:
            return self._call(body), body.end
        except CallError as refusal:
            return refusal, body.end

    def _call(self, body: _Body) -> ToolCall:
        text = self.text
        closed = text.find(">", body.first, body.last)
        name = text[body.first : max(closed, body.first)].strip()
        if not name:
            raise CallError(f"a tool call has no '{_FUNCTION}NAME>': {shown(text[body.first : body.last])}")
        types = _types(name, self.tools)
        arguments: dict[str, Any] = {}
        for part in self._parameters(closed + 1, body, name):
            key, closing, value = part.partition(">")
            key = key.strip()
            if not closing:
                raise CallError(f"tool call '{shown(name)}': a parameter without '>': {shown(part)}")
            if key in arguments:
                raise CallError(f"tool call '{shown(name)}': the parameter '{shown(key)}' is given twice")
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = _typed(value, types.get(key, ()), f"'{shown(name)}', '{shown(key)}'")
        return ToolCall(name, arguments)

    def _parameters(self, place: int, body: _Body, name: str) -> list[str]:
        """Returns the texts `KEY>VALUE` of a body, without the tags around them."""
        text = self.text
        inside = text[place : body.last]
        begin = len(inside) - len(inside.lstrip())
        if begin == len(inside):
            return []
        if not inside.startswith(_PARAMETER, begin):
            raise CallError(
                f"tool call '{shown(name)}': its parameters begin with {shown(inside)!r}, expected '{_PARAMETER}KEY>'"
            )
        parts, begin = [], place + begin + len(_PARAMETER)
        inner = iter(body.inner)
        skipped = next(inner, None)
        found = _NEXT_PARAMETER.search(text, begin, body.last)
        while found:
            while skipped and skipped[1] <= found.start():
                skipped = next(inner, None)
            if skipped and skipped[0] <= found.start():
                found = _NEXT_PARAMETER.search(text, skipped[1], body.last)
                continue
            parts.append(text[begin : found.start()])
            begin = found.end()
            found = _NEXT_PARAMETER.search(text, begin, body.last)
        return [*parts, text[begin : body.last]]


class _Tags:
    """Beginnings and ends of calls in a message, matched like brackets."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tags = tags = list(_TAGS.finditer(text))
        self._begins = {tag.start(): place for place, tag in enumerate(tags) if tag["begin"] is not None}
        self._partner: dict[int, int] = {}  # place in `tags` of a beginning -> of its end
        open_calls: list[int] = []
        for place, tag in enumerate(tags):
            if tag["begin"] is not None:
                open_calls.append(place)
            elif tag["end"] is not None and open_calls:
                self._partner[open_calls.pop()] = place
        count = len(tags)
        self._next_end, self._last_end = [count] * (count + 1), [count] * (count + 1)
        for place in reversed(range(count)):
            if tags[place]["end"] is None:
                self._next_end[place] = self._next_end[place + 1]
            else:
                follows = place + 1 < count and tags[place + 1]["end"] is not None
                self._next_end[place], self._last_end[place] = place, self._last_end[place + 1] if follows else place

    def body(self, start: int) -> _Body | None:
        """Returns the body of the call that begins at index `start`; None if it lacks `<function=`."""
        place = self._begins.get(start)
        if place is None:
            return None
        tags, first = self._tags, self._tags[place].end()
        # An end directly after an end has no beginning: it is part of a value that continues.
        end = self._last_end[self._partner.get(place, self._next_end[place])]
        if end == len(tags):
            return self._unclosed(first)
        spans, inner = [], place + 1
        while inner < end:
            over = self._partner.get(inner, end)
            if over < end:
                spans.append((tags[inner].start(), tags[over].end()))
                inner = over
            inner += 1
        return _Body(first, tags[end].start(), tags[end].end(), tuple(spans))

    def _unclosed(self, first: int) -> _Body:
        """Returns the body of a call that lacks some of its closing tags, up to the end of the message."""
        cut = self._text.rfind("</function>", first)
        last = len(self._text) if cut < 0 else cut
        closing = _LAST_PARAMETER_END.search(self._text, first, last)
        return _Body(first, closing.start() if closing else last, len(self._text))


def _types(name: str, tools: Sequence[Schema]) -> dict[str, tuple[str, ...]]:
    """Returns the allowed JSON types of each argument of a tool; () if its schema does not restrict them."""
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            properties = function.get("parameters", {}).get("properties", {})
            return {key: _named(schema) for key, schema in properties.items()}
    return {}


def _named(schema: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = schema.get("type", ())
    found = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    for other in schema.get("anyOf", ()):
        found += _named(other)
    return (*found, "null") if found and schema.get("nullable") else found


def _typed(value: str, types: tuple[str, ...], where: str) -> Any:
    """Converts a value to the first type that it fits; raises CallError if it fits none."""
    for kind in ("null", "integer", "number", "boolean", "object", "array", "string"):
        if kind in types and (found := _read(value, kind)) is not None:
            return found[0]
    if types:
        raise CallError(f"tool call {where}: {shown(value)!r} is no {' or '.join(dict.fromkeys(types))}")
    return value


def _read(value: str, kind: str) -> tuple[Any] | None:
    """Parses a value as one JSON type; returns it in a 1-tuple, None if it is of another type."""
    text = value.strip()
    if kind == "string":
        return (value,)
    if kind == "null":
        return (None,) if text.lower() == "null" else None
    if kind == "boolean":
        return (_BOOLEANS[text.lower()],) if text.lower() in _BOOLEANS else None
    try:
        if kind == "integer":
            return (int(text),)
        if kind == "number":
            number = float(text)
            return ((int(number) if number == int(number) else number),) if math.isfinite(number) else None
        found, end = parse_json_at(text)
        if end < len(text):
            return None
        json.dumps(found, allow_nan=False)  # 1e999 is infinite
    except ValueError:
        return None
    return (found,) if isinstance(found, dict if kind == "object" else list) else None


FORMAT = Format(Qwen3Coder)
