"""From an assistant's text to an action: which tools it calls, and what of it cannot be read.

A format is a file in this folder that defines `FORMAT`, a function of the text and the tools' schemas. Nothing that a
model writes makes it raise, or take longer than the text is long.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mrl.environments.base import Action, Schema, ToolCall
from mrl.schema import registry

_SHOWN_CHARS = 80


class CallError(ValueError):
    """What looks like a call and is none, in a sentence for the model."""


@dataclass(frozen=True)
class Parsed:
    """What a text says.

    Attributes:
        content: What stands outside the calls.
        calls: In order; an error where one cannot be read.
    """

    content: str
    calls: tuple[ToolCall | CallError, ...] = ()


Format = Callable[[str, Sequence[Schema]], Parsed]
"""Reads a text; the schemas tell the types of arguments where the format has none."""


def find(name: str) -> Format:
    """The format of this name.

    Raises:
        UserError: There is none; the nearest name is offered.
    """
    found: Format = registry.find("environments.formats", name, "FORMAT")
    return found


def action(text: str, form: Format, tools: Sequence[Schema], max_calls: int) -> Action:
    """The action that a text is.

    Args:
        text: As it was sampled, without the end token.
        form: How calls are written.
        tools: Schemas of the environment's tools.
        max_calls: Of one message; those after the first `max_calls` are not made, and the model is told.
    """
    parsed = form(text, tools)
    taken = parsed.calls[:max_calls]
    errors = [str(call) for call in taken if isinstance(call, CallError)]
    if left := len(parsed.calls) - len(taken):
        errors.append(f"{left} of {len(parsed.calls)} tool calls were not made: at most {max_calls} in one message.")
    calls = tuple(call for call in taken if isinstance(call, ToolCall))
    return Action(text, parsed.content, calls, tuple(errors))


def loaded(text: str) -> Any:
    """JSON as it is defined: without NaN and Infinity.

    Raises:
        CallError: It is none.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise CallError(f"a tool call is nested too deeply: {shown(text)}") from None
    except ValueError as error:
        raise CallError(f"a tool call is no JSON ({error}): {shown(text)}") from None


def call_of(value: Any, *names: str) -> ToolCall:
    """The call that a JSON object says.

    Args:
        value: {"name": ..., "arguments": {...}}.
        names: Under which the arguments may stand.

    Raises:
        CallError: It says none.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise CallError(f"a tool call has no 'name': {shown(json.dumps(value))}")
    given = [value[name] for name in names if name in value]
    if not given or not isinstance(given[0], dict):
        what = f"are {shown(json.dumps(given[0]))}, expected an object" if given else "are missing"
        raise CallError(f"tool call '{shown(value['name'])}': its '{names[0]}' {what}")
    return ToolCall(value["name"], given[0])


def shown(text: str) -> str:
    """The beginning of a text."""
    text = text.strip()
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
