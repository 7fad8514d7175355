"""Environments whose tools are Python functions: the model calls them until it answers without a call."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from mrl.environments._event_loop import awaited
from mrl.environments._schemas import tool_name
from mrl.environments.base import Action, Environment, Message, Observation, Tool, ToolCall
from mrl.errors import first_line


class ToolEnvironment(Environment):
    """Runs the tools that an action calls; a message without a call ends the episode with what `answered` says of it.

    Override `tools`, `reset`, and `answered` where the environment has a reward of its own.
    """

    def step(self, action: Action) -> Observation:
        """One tool message for each call; a call that fails, or cannot be read, gets the error as its message."""
        if not action.tool_calls and not action.errors:
            return self.answered(action)
        named: dict[str, Callable[..., Any]] = {tool_name(tool): tool for tool in self.tools if callable(tool)}
        results = [called(named, call) for call in action.tool_calls]
        mistakes: list[Message] = [{"role": "tool", "content": f"Error: {error}"} for error in action.errors]
        return Observation((*results, *mistakes))

    def answered(self, action: Action) -> Observation:
        """The end of the episode: without a reward of its own unless overridden."""
        return Observation(terminated=True)


def called(tools: dict[str, Tool], call: ToolCall) -> Message:
    """The tool's message: what it returned, as JSON where that is no text, or its error.

    Raises:
        MemoryError: Nobody knows then what the process still holds.
    """
    return {"role": "tool", "name": call.name, "content": _result(tools, call)}


def _result(tools: dict[str, Tool], call: ToolCall) -> str:
    if call.name not in tools:
        return f"Error: there is no tool '{call.name}'. There are: {', '.join(tools)}."
    tool = tools[call.name]
    try:
        inspect.signature(tool).bind(**call.arguments)
    except TypeError as error:
        return f"Error: {call.name}: {error}. It takes {inspect.signature(tool)}."
    try:
        return as_text(awaited(tool(**call.arguments)))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a tool may raise anything, and the model is told
        return f"Error: {type(error).__name__}: {first_line(error)}"


def as_text(value: Any) -> str:
    """A result for the model: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
