"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

Values are texts; the tool's schema says which type they become. Source: the chat template of Qwen3-Coder; read as
vLLM's `qwen3_coder` parser does, except that tags inside a value are part of it.

The format has no escapes, so a text may hold any of its tags. Tags count only in their full order: a call ends with
`</parameter></function></tool_call>`, white space between them allowed, and an argument ends with `</parameter>` before
the next `<parameter=`. A value may hold whole calls (an example in a document that is written, say): the end of a call
is found by matching beginnings with ends, as brackets are matched.
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
from mrl.environments.formats.base import Call, CallError, Format, Scanner, decoded, shown
from mrl.environments.formats.hermes import END, START

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_TAGS = re.compile(
    # A function after another may lack a <tool_call> of its own.
    rf"(?P<begin>(?:{START}|(?<=</function>))\s*{_FUNCTION})"
    rf"|(?P<end>(?:</parameter>\s*)?</function>(?:\s*{END}|(?=\s*(?:{START}\s*)?{_FUNCTION})|\s*\Z))"
    rf"|{reasoning.MARK}"  # an end before reasoning is none of a call that goes on after it
)
_EDGE = re.compile(rf"{END}|(?={START})")
_NEXT_PARAMETER = re.compile(rf"</parameter>\s*{_PARAMETER}")
_LAST_PARAMETER_END = re.compile(r"</parameter>\s*\Z")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class _Body:
    """The part of a message between the beginning and the end of a call.

    Attributes:
        first: Index after `<function=`.
        last: Index of the closing tags.
        end: Index after them.
        inner: Spans [first, last) of whole calls inside it, in order.
    """

    first: int
    last: int
    end: int
    inner: tuple[tuple[int, int], ...] = ()


class Qwen3Coder(Scanner):
    """Calls in tags; the last call of a message may lack its closing tags."""

    opening = rf"{START}|(?<=</function>)\s*{_FUNCTION}"

    def __init__(self, text: str, tools: Sequence[Schema]) -> None:
        """See `Scanner`."""
        super().__init__(text, tools)
        self._tags = _Tags(text)

    def call_at(self, start: int, visible: int) -> tuple[Call | None, int]:
        """See `Scanner.call_at`."""
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
    """The tags of a message in which calls begin and end, matched as brackets are."""

    def __init__(self, text: str) -> None:
        """Args: text: The message."""
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
        """Returns the body of the call that begins at index `start`; None: there is no `<function=`."""
        place = self._begins.get(start)
        if place is None:
            return None
        tags, first = self._tags, self._tags[place].end()
        # An end that follows an end has no beginning: it is part of a value that goes on.
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
    """Returns the JSON types that each argument of a tool may have; none where its schema leaves them open."""
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
    """Returns the value converted to the first of the types that it fits; raises CallError where it fits none."""
    for kind in ("null", "integer", "number", "boolean", "object", "array", "string"):
        if kind in types and (found := _read(value, kind)) is not None:
            return found[0]
    if types:
        raise CallError(f"tool call {where}: {shown(value)!r} is no {' or '.join(dict.fromkeys(types))}")
    return value


def _read(value: str, kind: str) -> tuple[Any] | None:
    """Returns the value in a tuple; None where it is of another kind."""
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
        found, end = decoded(text)
        if end < len(text):
            return None
        json.dumps(found, allow_nan=False)  # 1e999 is infinite
    except ValueError:
        return None
    return (found,) if isinstance(found, dict if kind == "object" else list) else None


FORMAT = Format(Qwen3Coder)
