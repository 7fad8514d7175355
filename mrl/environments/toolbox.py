"""Base class of environments whose tools are Python functions; a message without a tool call ends the episode."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from mrl.environments._event_loop import await_result
from mrl.environments._schemas import tool_name
from mrl.environments.base import Action, Environment, Message, Observation, Tool, ToolCall
from mrl.errors import first_line


class ToolEnvironment(Environment):
    """Environment that runs the tools that an action calls; a message without a call ends the episode.

    Subclasses define `tools` and `reset`, and override `answered` to reward the final answer.
    """

    def step(self, action: Action) -> Observation:
        """Returns one tool message per call; failed and malformed calls get an error message."""
        if not action.tool_calls and not action.errors:
            return self.answered(action)
        named: dict[str, Callable[..., Any]] = {tool_name(tool): tool for tool in self.tools if callable(tool)}
        results = [call_tool(named, call) for call in action.tool_calls]
        mistakes: list[Message] = [{"role": "tool", "content": f"Error: {error}"} for error in action.errors]
        return Observation((*results, *mistakes))

    def answered(self, action: Action) -> Observation:
        """Ends the episode after the final answer; the default gives no reward."""
        return Observation(terminated=True)


def call_tool(tools: dict[str, Tool], call: ToolCall) -> Message:
    """Calls a tool and returns its message: the result, as JSON unless it is a text, or the error.

    Raises:
        MemoryError: The tool ran out of memory; the process should not be used again.
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
        return as_text(await_result(tool(**call.arguments)))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a tool may raise anything; the model sees the error
        return f"Error: {type(error).__name__}: {first_line(error)}"


def as_text(value: Any) -> str:
    """Converts a tool's result to text: texts unchanged, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
