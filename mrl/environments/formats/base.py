"""Parsing of tool calls in an assistant's text, with errors for malformed calls.

A format is a file in this folder that defines `FORMAT`, a `Format` around a `Scanner`. The scanner parses one call;
`Format` searches the message and skips reasoning. Parsing never raises, and takes time linear in the length of the
text.

Reasoning is enclosed in the tags of `mrl/config/reasoning.py`. Calls inside reasoning are ignored, malformed ones too:

- Reasoning without its closing tag extends to the end of the message.
- If the prompt ends with an opening tag (written by the chat template), the message begins inside the reasoning.
- A closing tag without an opening one also ends reasoning: nothing before it is a call. A closing tag in an argument of
  a well-formed call is part of the argument.
- A tag in quotes or backticks outside reasoning is text.
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
"""Number of tokens at the end of a prompt that are decoded: enough for an opening tag and white space after it."""

_SHOWN_CHARS = 80


class CallError(ValueError):
    """Parse error of a malformed tool call; the message is a sentence for the model."""


Call = ToolCall | CallError
"""A parsed call, or its parse error."""


@dataclass(frozen=True)
class Parsed:
    """The content and the calls of a message.

    Attributes:
        content: Text before the first call, including reasoning; the complete text if there is no call.
        calls: Parsed calls and parse errors, in order.
    """

    content: str
    calls: tuple[Call, ...] = ()


class Scanner(ABC):
    """Parser of the calls in one message."""

    opening: ClassVar[str]
    """Regular expression that matches the beginning of a call."""

    def __init__(self, text: str, tools: Sequence[Schema]) -> None:
        """Stores the message, and the tools' schemas for the types of arguments that a format does not mark."""
        self.text, self.tools = text, tools

    @abstractmethod
    def call_at(self, start: int, visible: int) -> tuple[Call | None, int]:
        """Parses the call that begins at `start`.

        Args:
            start: Index of a match of `opening`.
            visible: Index at which the text after the last reasoning begins.

        Returns:
            The call, None if it is ordinary text; and the index at which to continue, larger than `start`.
        """


@dataclass(frozen=True)
class Format:
    """A tool-call format, which parses messages with its scanner."""

    scanner: type[Scanner]

    def __call__(self, text: str, tools: Sequence[Schema], *, prompt: str = "") -> Parsed:
        """Parses a message.

        Args:
            text: Sampled text, without the end token.
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
                    # The malformed call may be part of reasoning that a later closing tag ends.
                    closed = reasoning.closing_in(text, start, place)
                if call is not None and closed is None:
                    found.append((start, call))
            if closed is not None:
                found.clear()
                visible = place = closed
        return Parsed(text[: found[0][0]], tuple(call for _, call in found)) if found else Parsed(text)


def prompt_tail(prompt_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """Returns the end of a prompt's text, long enough to detect an opening tag of reasoning."""
    return decode(prompt_ids[-_TAIL_TOKENS:])


def find_format(name: str) -> Format:
    """Returns the format of this name.

    Raises:
        UserError: The name is unknown; the message suggests the most similar one.
    """
    found: Format = registry.find("environments.formats", name, "FORMAT")
    return found


def parse_action(text: str, form: Format, tools: Sequence[Schema], max_calls: int, *, prompt: str = "") -> Action:
    """Parses a message of the policy into an action.

    Args:
        text: Sampled text, without the end token.
        form: Tool-call format.
        tools: Schemas of the environment's tools.
        max_calls: Largest number of calls per message; further ones are dropped, with an error for the model.
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
    """Parse error of a call that is not JSON.

    Attributes:
        place: Index in the text of the JSON error.
    """

    def __init__(self, reason: str, place: int) -> None:
        super().__init__(reason)
        self.place = place


def parse_json_at(text: str, start: int = 0) -> tuple[Any, int]:
    """Parses the JSON value that begins at `start`; returns it and the index of its end.

    Rejects NaN and Infinity.

    Raises:
        NotJsonError: The text is not JSON.
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


def to_tool_call(value: Any, *names: str) -> ToolCall:
    """Converts a JSON object to a call.

    Args:
        value: Object such as {"name": ..., "arguments": {...}}.
        names: Accepted keys of the arguments.

    Raises:
        CallError: The value lacks a name or arguments.
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
