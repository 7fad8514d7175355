"""Reading of tool calls: from an assistant's text to the calls in it, and errors for calls that cannot be read.

A format is a file in this folder that defines `FORMAT`, a `Format` around a `Scanner`. The scanner knows how one call
is written; `Format` walks over the message and leaves reasoning out. No text makes it raise, and the time it takes
grows with the length of the text.

Reasoning stands between the tags of `mrl/config/reasoning.py`. A call inside reasoning is not made, and a tag that
reasoning mentions is no error:

- Reasoning without its closing tag goes on to the end of the message.
- Where the prompt ends with an opening tag (the chat template wrote it), the message begins inside the reasoning.
- A closing tag without an opening one ends reasoning too: nothing before it is a call. A closing tag in an argument of
  a readable call is part of the argument.
- A tag in quotes or backticks outside reasoning is a mention.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from mrl.config import reasoning, registry
from mrl.environments.base import Action, Schema, ToolCall

_TAIL_TOKENS = 200
"""Tokens at the end of a prompt that are decoded: more than an opening tag and the white space after it have."""

_SHOWN_CHARS = 80


class CallError(ValueError):
    """What looks like a call and is none, in a sentence for the model."""


Call = ToolCall | CallError
"""A call, or why it cannot be read."""


@dataclass(frozen=True)
class Parsed:
    """The content and the calls of a message.

    Attributes:
        content: Text before the first call, reasoning included; the whole text where there is no call.
        calls: In order; an error where a call cannot be read.
    """

    content: str
    calls: tuple[Call, ...] = ()


class Scanner(ABC):
    """Reader of the calls of one message."""

    opening: ClassVar[str]
    """Regular expression of what a call may begin with."""

    def __init__(self, text: str, tools: Sequence[Schema]) -> None:
        """Args: text: The message. tools: Schemas, for the types of arguments where the format has none."""
        self.text, self.tools = text, tools

    @abstractmethod
    def call_at(self, start: int, visible: int) -> tuple[Call | None, int]:
        """Reads the call that begins at `start`.

        Args:
            start: Index of a match of `opening`.
            visible: Index where the text after the last reasoning begins.

        Returns:
            The call, None where this is ordinary text; and the index at which to go on, larger than `start`.
        """


@dataclass(frozen=True)
class Format:
    """A tool-call format: reads a whole message with its scanner."""

    scanner: type[Scanner]

    def __call__(self, text: str, tools: Sequence[Schema], *, prompt: str = "") -> Parsed:
        """Reads a message.

        Args:
            text: As it was sampled, without the end token.
            tools: Schemas of the tools.
            prompt: Text before the message, or its end (`prompt_tail`); it may open reasoning.
        """
        scanner = self.scanner(text, tools)
        tags = re.compile(f"{reasoning.MARK}|{scanner.opening}")
        visible = place = reasoning.end_of_opened(text, prompt)
        found: list[tuple[int, Call]] = []
        while match := tags.search(text, place):
            start = match.start()
            if match["quoted"]:
                place = match.end()
                continue
            closed = match.end() if match["closing"] else None
            if match["opening"] or match["final"]:
                visible = place = reasoning.end_of_reasoning(text, match)
            elif closed is None:
                call, place = scanner.call_at(start, visible)
                if not isinstance(call, ToolCall):
                    # Text that cannot be read as a call may be prose of reasoning that the closing tag ends.
                    closed = reasoning.closing_in(text, start, place)
                if call is not None and closed is None:
                    found.append((start, call))
            if closed is not None:
                found.clear()
                visible = place = closed
        return Parsed(text[: found[0][0]], tuple(call for _, call in found)) if found else Parsed(text)


def prompt_tail(prompt_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """Returns the end of a prompt's text, enough to see whether the prompt opens reasoning."""
    return decode(prompt_ids[-_TAIL_TOKENS:])


def find(name: str) -> Format:
    """Returns the format of this name.

    Raises:
        UserError: There is none; the message offers the nearest name.
    """
    found: Format = registry.find("environments.formats", name, "FORMAT")
    return found


def action(text: str, form: Format, tools: Sequence[Schema], max_calls: int, *, prompt: str = "") -> Action:
    """Reads a message of the policy as an action.

    Args:
        text: As it was sampled, without the end token.
        form: How calls are written.
        tools: Schemas of the environment's tools.
        max_calls: Most calls of one message; later ones are not made, and the action has an error for the model.
        prompt: Text before the message, or its end (`prompt_tail`); it may open reasoning.
    """
    parsed = form(text, tools, prompt=prompt)
    taken = parsed.calls[:max_calls]
    errors = [str(call) for call in taken if isinstance(call, CallError)]
    if left := len(parsed.calls) - len(taken):
        errors.append(f"{left} of {len(parsed.calls)} tool calls were not made: at most {max_calls} in one message.")
    calls = tuple(call for call in taken if isinstance(call, ToolCall))
    return Action(text, parsed.content, calls, tuple(errors))


class NotJsonError(CallError):
    """Text that is not JSON where a call should be.

    Attributes:
        place: Index in the text at which it stops being JSON.
    """

    def __init__(self, reason: str, place: int) -> None:
        super().__init__(reason)
        self.place = place


def decoded(text: str, start: int = 0) -> tuple[Any, int]:
    """Reads the JSON value that begins at `start`, and returns it with the index of its end.

    NaN and Infinity are not JSON.

    Raises:
        NotJsonError: There is no JSON value.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except RecursionError:
        raise NotJsonError(f"a tool call is nested too deeply: {_part(text, start)}", len(text)) from None
    except ValueError as error:  # json.JSONDecodeError, or an integer with too many digits
        place = int(getattr(error, "pos", len(text)))
        reason = getattr(error, "msg", str(error))
        raise NotJsonError(f"a tool call is no JSON ({reason}): {_part(text, start)}", place) from None
    return value, end


def call_of(value: Any, *names: str) -> ToolCall:
    """Returns the call that a JSON object describes.

    Args:
        value: {"name": ..., "arguments": {...}}.
        names: Keys that may hold the arguments.

    Raises:
        CallError: It does not describe a call.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise CallError(f"a tool call has no 'name': {shown(json.dumps(value))}")
    given = [value[name] for name in names if name in value]
    if not given or not isinstance(given[0], dict):
        what = f"are {shown(json.dumps(given[0]))}, expected an object" if given else "are missing"
        raise CallError(f"tool call '{shown(value['name'])}': its '{names[0]}' {what}")
    return ToolCall(value["name"], given[0])


def shown(text: str) -> str:
    """Returns the beginning of a text, for messages."""
    text = text[: 4 * _SHOWN_CHARS].strip()
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _part(text: str, start: int) -> str:
    return shown(text[start : start + 4 * _SHOWN_CHARS])


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
