"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

Values are texts; the tool's schema says what type they become. Source: the chat template of Qwen3-Coder; read as vLLM's
`qwen3_coder` parser does, call by call.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.environments.base import Schema, ToolCall
from mrl.environments.formats.base import CallError, Parsed, loaded, shown
from mrl.environments.formats.hermes import START, bodies

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def qwen3_coder(text: str, tools: Sequence[Schema]) -> Parsed:
    """The content is what stands before the first call; a last call may lack its ends."""
    content, start, _ = text.partition(START)
    return Parsed(content, tuple(_call(body, tools) for body in bodies(text))) if start else Parsed(text)


def _call(body: str, tools: Sequence[Schema]) -> ToolCall | CallError:
    _, begun, rest = body.partition(_FUNCTION)
    name, closed, rest = rest.partition(">")
    if not (begun and closed and name.strip()):
        return CallError(f"a tool call has no '{_FUNCTION}NAME>': {shown(body)}")
    types = _types(name.strip(), tools)
    arguments: dict[str, Any] = {}
    try:
        for part in rest.partition(_FUNCTION_END)[0].split(_PARAMETER)[1:]:
            key, closed, value = part.partition(">")
            if not closed:
                return CallError(f"tool call '{shown(name)}': a parameter without '>': {shown(part)}")
            value = value.partition(_PARAMETER_END)[0].removeprefix("\n").removesuffix("\n")
            arguments[key.strip()] = _typed(value, types.get(key.strip(), ()), f"'{shown(name)}', '{shown(key)}'")
    except CallError as error:
        return error
    return ToolCall(name.strip(), arguments)


def _types(name: str, tools: Sequence[Schema]) -> dict[str, tuple[str, ...]]:
    """The JSON types that each argument of a tool may have; none for what its schema leaves open."""
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
    """The value as the first of the types that it has; CallError where it has none of them."""
    for kind in ("null", "integer", "number", "boolean", "object", "array", "string"):
        if kind in types and (found := _read(value, kind)) is not None:
            return found[0]
    if types:
        raise CallError(f"tool call {where}: {shown(value)!r} is no {' or '.join(dict.fromkeys(types))}")
    return value


def _read(value: str, kind: str) -> tuple[Any] | None:
    """The value in a tuple; None where it is of another kind."""
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
        found = loaded(text)
        json.dumps(found, allow_nan=False)  # 1e999 is infinite
    except ValueError:
        return None
    return (found,) if isinstance(found, dict if kind == "object" else list) else None


FORMAT = qwen3_coder
