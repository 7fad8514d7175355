"""Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, several with `;` between, perhaps after `<|python_tag|>`.

Source: Meta's prompt format for Llama 3.1; read as vLLM's `llama3_json` parser does, call by call. Objects in a message
that does not begin with one are calls where they have a name; what else has braces in it is text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from mrl.environments.base import Schema, ToolCall
from mrl.environments.formats.base import CallError, Parsed, _refuse, call_of, shown

TAG = "<|python_tag|>"

_MAX_MISREAD = 16  # braces that begin no JSON: each costs the length of the text, and what follows is text

_DECODER = json.JSONDecoder(parse_constant=_refuse)


def llama3_json(text: str, tools: Sequence[Schema]) -> Parsed:
    """The content is what stands before the first call."""
    before, tag, rest = text.partition(TAG)
    body, offset = (rest, len(before) + len(tag)) if tag else (text, 0)
    meant = bool(tag) or body.lstrip().startswith("{")  # the message is a call, whatever becomes of it
    calls: list[ToolCall | CallError] = []
    first, place, misread = len(text), body.find("{"), 0
    while place >= 0 and misread < _MAX_MISREAD:
        try:
            value, end = _DECODER.raw_decode(body, place)
            call: ToolCall | CallError = call_of(value, "parameters", "arguments")
        except RecursionError:
            call, end, value = CallError(f"a tool call is nested too deeply: {shown(body[:200])}"), len(body), None
        except CallError as error:
            call = error
        except ValueError as error:
            told = getattr(error, "pos", len(body))
            part = shown(body[place : place + 200])
            call, end, value = CallError(f"a tool call is no JSON ({error}): {part}"), told, None
            misread += 1
        if isinstance(call, ToolCall) or meant or _names(value):
            calls.append(call)
            first = min(first, place + offset)
        if isinstance(call, CallError) and value is None and meant:
            break  # what follows half a call is not told from it
        place = body.find("{", max(end, place + 1))
    return Parsed(before if tag else text[:first], tuple(calls)) if calls else Parsed(text)


def _names(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)


FORMAT = llama3_json
