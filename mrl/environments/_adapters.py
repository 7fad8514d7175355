"""Adapters for environments of other libraries, detected by their methods; the libraries are not imported.

- `reset` and `step`: Gymnasium's environments and OpenEnv's clients.
- `create`, `execute`, `calc_reward` and `release`: a tool of verl (`verl_tools.py` takes several).
- `reset` and public methods: an object of TRL's `environment_factory`; the methods are tools.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from mrl.environments._event_loop import await_result
from mrl.environments._schemas import schema_of
from mrl.environments.base import Action, Environment, Message, Observation, Schema, Tool, ToolCall
from mrl.environments.toolbox import ToolEnvironment, as_text, call_tool
from mrl.errors import UserError

_VERL = ("create", "execute", "calc_reward", "release")


def adapt(made: object, name: str) -> Environment:
    """Wraps an object as an environment.

    Raises:
        UserError: The object's methods match none of the supported interfaces.
    """
    if isinstance(made, Environment):
        return made
    has = {word for word in ("reset", "step", *_VERL) if callable(getattr(made, word, None))}
    if {"reset", "step"} <= has:
        return GymAdapter(made)
    if has >= set(_VERL):
        return VerlTools([made])
    if "reset" in has:
        return TrlAdapter(made)
    raise UserError(
        f"environment '{name}' makes a {type(made).__name__}, expected an Environment, or an object with reset and "
        "step (Gymnasium, OpenEnv), with create, execute, calc_reward and release (verl), or with reset and tools as "
        "public methods (TRL)."
    )


class GymAdapter(Environment):
    """Adapter of an object with Gymnasium's or OpenEnv's `reset` and `step`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def tools(self) -> Sequence[Tool | Schema]:
        """The object's `tools`, an attribute or a method; default: none."""
        found = getattr(self._inner, "tools", ())
        return tuple(found() if callable(found) else found)

    def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Calls `reset` with those of `seed`, `options` (the row) and `row` that it accepts."""
        given = {"seed": seed, "options": dict(row), "row": dict(row)}
        return to_observation(await_result(self._inner.reset(**_accepted(self._inner.reset, given))))

    def step(self, action: Action) -> Observation:
        """Calls `step` with the text, or according to its annotation with the `Action` or an object of one field."""
        return to_observation(await_result(self._inner.step(_as_parameter(self._inner.step, action))))

    def close(self) -> None:
        """Calls the object's `close`, if it has one."""
        if callable(close := getattr(self._inner, "close", None)):
            await_result(close())


class TrlAdapter(ToolEnvironment):
    """Adapter of an object of TRL's `environment_factory`: public methods are tools, `get_reward` is the final reward.

    The return value of `reset` becomes a user message after the prompt; TRL appends it to the prompt's last message.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def tools(self) -> Sequence[Tool]:
        """The object's public methods, sorted by name as in TRL."""
        names = [name for name, _ in inspect.getmembers(type(self._inner), inspect.isfunction)]
        return [getattr(self._inner, name) for name in names if name not in _NO_TOOLS and not name.startswith("_")]

    def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Calls `reset` with the row's columns, as TRL does, and with `seed` if it has such a parameter."""
        parameters = inspect.signature(self._inner.reset).parameters
        given = dict(row) | ({"seed": seed} if "seed" in parameters else {})
        return to_observation(await_result(self._inner.reset(**given)))

    def answered(self, action: Action) -> Observation:
        """Ends the episode with the reward of `get_reward`."""
        score = getattr(self._inner, "get_reward", None)
        return Observation(reward=None if score is None else float(await_result(score())), terminated=True)

    def close(self) -> None:
        """Calls the object's `close`, if it has one."""
        if callable(close := getattr(self._inner, "close", None)):
            await_result(close())


_NO_TOOLS = ("reset", "get_reward", "close")


class VerlTools(ToolEnvironment):
    """Adapter of verl's tools: `create` makes an instance of each for the episode, `release` ends it."""

    def __init__(self, tools: Sequence[Any], reward: str = "none") -> None:
        """Stores the tools.

        Args:
            tools: Objects of classes derived from verl's `BaseTool`.
            reward: Source of the reward. "execute": in each turn, the sum over its calls of `execute`. "calc_reward":
                in the last turn, the sum over the tools. "none", as in verl: reward functions score the episode, and
                the tools' rewards are only recorded.
        """
        if reward not in ("none", "execute", "calc_reward"):
            raise UserError(f"verl tools: reward='{reward}', expected none, execute or calc_reward.")
        self._by_name = {_schema(tool)["function"]["name"]: tool for tool in tools}
        self._reward = reward
        self._ids: dict[str, str] = {}
        self._kwargs: Mapping[str, Any] = {}

    @property
    def tools(self) -> Sequence[Schema]:
        """The tools' own schemas."""
        return [_schema(tool) for tool in self._by_name.values()]

    def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Calls `create` of each tool with the row's `extra_info.tools_kwargs`, as in verl."""
        extra = row.get("extra_info")
        self._kwargs = (extra if isinstance(extra, Mapping) else row).get("tools_kwargs") or {}
        for name, tool in self._by_name.items():
            made = await_result(tool.create(**self._given(name, "create_kwargs")))
            self._ids[name] = made[0] if isinstance(made, tuple) else made
        return Observation()

    def step(self, action: Action) -> Observation:
        """Calls `execute` for each tool call; ends the episode if there is none."""
        if not action.tool_calls and not action.errors:
            return self.answered(action)
        messages: list[Message] = []
        rewards: list[float] = []
        for call in action.tool_calls:
            message, reward = self._executed(call)
            messages.append(message)
            rewards += [] if reward is None else [float(reward)]
        messages += [{"role": "tool", "content": f"Error: {error}"} for error in action.errors]
        info: dict[str, float | str] = {"tool_reward": math.fsum(rewards)} if rewards else {}
        taken = math.fsum(rewards) if rewards and self._reward == "execute" else None
        return Observation(tuple(messages), taken, info=info)

    def answered(self, action: Action) -> Observation:
        """Ends the episode; records `calc_reward` of each tool."""
        scores = {
            name: await_result(tool.calc_reward(self._ids[name], **self._given(name, "calc_reward_kwargs")))
            for name, tool in self._by_name.items()
        }
        known = {f"calc_reward/{name}": float(score) for name, score in scores.items() if score is not None}
        reward = math.fsum(known.values()) if known and self._reward == "calc_reward" else None
        return Observation(reward=reward, terminated=True, info=dict(known))

    def close(self) -> None:
        """Calls `release` of each tool."""
        for name, instance in self._ids.items():
            await_result(self._by_name[name].release(instance, **self._given(name, "release_kwargs")))

    def _given(self, name: str, which: str) -> dict[str, Any]:
        return dict((self._kwargs.get(name) or {}).get(which) or {})

    def _executed(self, call: ToolCall) -> tuple[Message, float | None]:
        """Calls `execute`; returns the tool's message and the reward."""
        rewards: list[float | None] = []

        def execute() -> str:
            tool, instance = self._by_name[call.name], self._ids[call.name]
            returned = await_result(tool.execute(instance, call.arguments, **self._given(call.name, "execute_kwargs")))
            response, reward, *_ = returned if isinstance(returned, tuple) else (returned, None)
            rewards.append(reward)
            return as_text(getattr(response, "text", response) or "")

        known: dict[str, Callable[..., Any]] = dict.fromkeys(self._by_name, execute)
        plain = ToolCall(call.name) if call.name in known else call
        return call_tool(known, plain), rewards[0] if rewards else None


def _schema(tool: Any) -> Schema:
    """Returns the schema of a verl tool, which has it as a mapping or a pydantic model."""
    found = tool.get_openai_tool_schema() if hasattr(tool, "get_openai_tool_schema") else tool.tool_schema
    dump = getattr(found, "model_dump", None)
    return schema_of(dump(exclude_unset=True, exclude_none=True) if dump is not None else found)


def to_observation(returned: Any) -> Observation:
    """Converts the return value of another library's `reset` or `step` into an observation.

    Accepts Gymnasium's tuples, OpenEnv's results, and an observation alone.
    """
    match returned:
        case Observation():
            return returned
        case (seen, reward, bool() as terminated, bool() as truncated, info):
            return Observation(_messages(seen), _number(reward), terminated, truncated, _facts(info))
        case (seen, reward, bool() as done, info):
            return Observation(_messages(seen), _number(reward), done, info=_facts(info))
        case (seen, Mapping() as info):
            return Observation(_messages(seen), info=_facts(info))
    seen = getattr(returned, "observation", returned)
    reward = getattr(returned, "reward", getattr(seen, "reward", None))
    done = bool(getattr(returned, "done", getattr(seen, "done", False)))
    return Observation(_messages(seen), _number(reward), done, info=_facts(getattr(returned, "metadata", None)))


def _messages(seen: Any) -> tuple[Message, ...]:
    """Converts an observation to messages: texts and messages directly, objects by a text field, or as JSON."""
    if seen is None or seen == "":
        return ()
    if isinstance(seen, str):
        return ({"role": "user", "content": seen},)
    if isinstance(seen, Mapping) and {"role", "content"} <= seen.keys():
        return (dict(seen),)
    if isinstance(seen, list) and all(isinstance(item, Mapping) and "role" in item for item in seen):
        return tuple(dict(item) for item in seen)
    fields = _fields(seen)
    for name in ("messages", "text", "content", "message"):
        if name in fields:
            return _messages(fields[name])
    shown = {key: value for key, value in fields.items() if key not in ("reward", "done", "metadata")}
    return ({"role": "user", "content": json.dumps(shown if fields else seen, ensure_ascii=False, default=str)},)


def _fields(seen: Any) -> dict[str, Any]:
    """Returns the fields of a mapping, a dataclass or a pydantic model; {} for other objects."""
    if isinstance(seen, Mapping):
        return dict(seen)
    if dataclasses.is_dataclass(seen) and not isinstance(seen, type):
        return {item.name: getattr(seen, item.name) for item in dataclasses.fields(seen)}
    dump = getattr(seen, "model_dump", None)
    return dict(dump()) if dump is not None else {}


def _facts(info: Any) -> dict[str, float | str]:
    """Returns the texts and finite numbers of a mapping."""
    found = info if isinstance(info, Mapping) else {}
    numbers = {str(key): float(value) for key, value in found.items() if _is_finite(value)}
    return numbers | {str(key): value for key, value in found.items() if isinstance(value, str)}


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _number(reward: Any) -> float | None:
    return None if reward is None else float(reward)


def _accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that the function has a parameter for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in given.items() if name in parameters}


def _as_parameter(step: Callable[..., Any], action: Action) -> Any:
    """Converts the action to the type that `step` is annotated with."""
    parameters = list(inspect.signature(step).parameters.values())
    kind = get_type_hints(step).get(parameters[0].name) if parameters else None
    if kind is Action:
        return action
    named = getattr(kind, "model_fields", None) or (
        {item.name: item for item in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    )
    needed = [name for name, item in named.items() if _is_needed(item)]
    return kind(**{needed[0]: action.text}) if isinstance(kind, type) and len(needed) == 1 else action.text


def _is_needed(item: Any) -> bool:
    """Returns whether a field of a dataclass or a pydantic model has no default."""
    if isinstance(item, dataclasses.Field):
        return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    return bool(item.is_required())
