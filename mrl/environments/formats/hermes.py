"""Hermes, and Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Source: NousResearch's Hermes function calling; read as vLLM's `hermes` parser does, call by call.
"""

from __future__ import annotations

from collections.abc import Sequence

from mrl.environments.base import Schema, ToolCall
from mrl.environments.formats.base import CallError, Parsed, call_of, loaded

START, END = "<tool_call>", "</tool_call>"


def hermes(text: str, tools: Sequence[Schema]) -> Parsed:
    """The content is what stands before the first call; a last call may lack its end."""
    content, start, _ = text.partition(START)
    return Parsed(content, tuple(_call(body) for body in bodies(text))) if start else Parsed(text)


def bodies(text: str) -> list[str]:
    """What stands between the tags, call by call; after a start without an end, all the rest."""
    found, place = [], text.find(START)
    while place >= 0:
        end = text.find(END, place)
        found.append(text[place + len(START) : end if end >= 0 else len(text)])
        place = text.find(START, end) if end >= 0 else -1
    return found


def _call(body: str) -> ToolCall | CallError:
    try:
        return call_of(loaded(body), "arguments")
    except CallError as error:
        return error


FORMAT = hermes
