"""Calling conventions of reward functions: mrl's, verl's and TRL's, detected by the names of the parameters.

verl 0.9.1 (`reward_manager/naive.py` of its reward loop) calls `compute_score(data_source, solution_str, ground_truth,
extra_info)`; TRL 1.16 (`GRPOTrainer._calculate_rewards`) calls `reward(prompts, completions, completion_ids,
**columns)` with lists, as verl's batch reward manager does. Imports no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

Arguments = dict[str, Any]

NUM_TURNS = "num_turns"
"""Key in `extra` of the number of the policy's turns in an episode."""

TURNS = 2
"""Messages per turn of the policy: verl's `extra_info["num_turns"]` counts both sides of a conversation."""

UNKNOWN_HERE = ("trainer_state", "environments")
"""Parameters of TRL's functions that are not available in a worker process."""

_OWN = ("prompt", "completion", "completion_ids")
"""Columns that TRL's functions receive under another name."""


@dataclass(frozen=True)
class Sample:
    """Inputs of a reward function for one response; see `base.RewardFunction`."""

    prompt: str
    response: str
    answer: str | None
    extra: dict[str, Any]
    text: str = ""
    """Response without special tokens, as verl and TRL pass it."""
    response_ids: tuple[int, ...] = ()
    question: str | list[dict[str, Any]] = ""
    """Prompt before the chat template: a text, or chat messages."""
    data_source: str = ""
    row: dict[str, Any] = field(default_factory=dict)
    """All columns of the data row."""


@dataclass(frozen=True)
class PendingCall:
    """A call of a reward function that may have to be awaited.

    Attributes:
        returned: Return value of the function; an awaitable if it is asynchronous.
        values: Converts the (awaited) return value into a list with a number, a mapping with "score", or None (no
            opinion) per sample; raises ValueError for a list of another length.
    """

    returned: Any
    values: Callable[[Any], list[Any]]


class Signature:
    """A reward function with mrl's calling convention; `Signature.of` selects the subclass for other conventions."""

    convention = "mrl"
    takes_lists = False
    """True if one call scores several samples, passed as lists."""

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        """Inspects the function.

        Args:
            function: Reward function.
            kwargs: Arguments from the config; they take precedence over the sample's.

        Raises:
            TypeError: The function does not accept these arguments.
        """
        self._function = function
        self._kwargs = dict(kwargs)
        self.parameters = inspect.signature(function)
        self._takes_all = any(one.kind is one.VAR_KEYWORD for one in self.parameters.parameters.values())
        self.is_async = _is_async(function)
        self.check()

    @staticmethod
    def of(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Signature:
        """Detects the calling convention from the names of the parameters.

        Raises:
            TypeError: The function does not accept the arguments of its convention.
            ValueError: The function has no inspectable signature.
        """
        names = set(inspect.signature(function).parameters)
        if "response" not in names:
            for mark, kind in _MARKS.items():
                if mark in names:
                    return kind(function, kwargs)
        return Signature(function, kwargs)

    def check(self) -> None:
        """Raises TypeError if the function does not accept the arguments that it will be called with."""
        self.parameters.bind(prompt="", response="", answer=None, extra={}, **self._kwargs)

    def given(self, samples: Sequence[Sample]) -> Arguments:
        """Returns the arguments for one sample, or for several if the function takes lists, without the config's."""
        (sample,) = samples
        return {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer} | {
            "extra": dict(sample.extra)
        }

    def start(self, samples: Sequence[Sample]) -> PendingCall:
        """Calls the function."""
        returned = self._function(**{**self.given(samples), **self._kwargs})
        return PendingCall(returned, lambda value: _listed(value, len(samples)) if self.takes_lists else [value])

    def _taken(self, arguments: Arguments) -> Arguments:
        """Returns the arguments that the function has a parameter for; all if it takes `**kwargs`."""
        return arguments if self._takes_all else {k: v for k, v in arguments.items() if k in self.parameters.parameters}


class Verl(Signature):
    """verl's `compute_score`; arguments without a parameter are omitted."""

    convention = "verl"
    names = ("data_source", "solution_str", "ground_truth", "extra_info")

    def check(self) -> None:
        """Overrides `Signature.check`."""
        self.parameters.bind(**{**self._taken(dict.fromkeys(self.names)), **self._kwargs})

    def given(self, samples: Sequence[Sample]) -> Arguments:
        """Overrides `Signature.given`."""
        columns = [(one.data_source, one.text, _ground_truth(one), _extra_info(one)) for one in samples]
        values = [list(column) for column in zip(*columns, strict=True)] if self.takes_lists else columns[0]
        return self._taken(dict(zip(self.names, values, strict=True)))


class VerlBatch(Verl):
    """Function of verl's batch reward manager, which takes lists and returns a list."""

    names = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
    takes_lists = True


class Trl(Signature):
    """TRL's reward function; it receives the answers and the other columns of the rows as lists."""

    convention = "TRL"
    takes_lists = True

    def check(self) -> None:
        """Overrides `Signature.check`; columns of the data are not known yet and not checked."""
        for name, one in self.parameters.parameters.items():
            if one.default is one.empty and name in UNKNOWN_HERE:
                raise TypeError(f"it needs '{name}' of TRL's trainer, which is not available in a worker process")
            if one.kind is one.POSITIONAL_ONLY:
                raise TypeError(f"its parameter '{name}' is positional-only, expected one that can be passed by name")
        if unknown := set(self._kwargs) - set(self._taken(self._kwargs)):
            raise TypeError(f"got an unexpected keyword argument '{min(unknown)}'")

    def given(self, samples: Sequence[Sample]) -> Arguments:
        """Overrides `Signature.given`."""
        names = {name: None for one in samples for name in one.row if name not in _OWN}
        columns: Arguments = {"answer": [one.answer for one in samples]}
        columns |= {name: [one.row.get(name) for one in samples] for name in names}
        columns |= {"prompts": [one.question for one in samples], "completions": [_completion(one) for one in samples]}
        columns |= {"completion_ids": [list(one.response_ids) for one in samples]}
        return self._taken(columns)

    def start(self, samples: Sequence[Sample]) -> PendingCall:
        """Overrides `Signature.start`; adds the metrics that the function logs to its values."""
        logged: list[dict[str, Any]] = [{} for _ in samples]
        loggers = self._taken({"log_metric": partial(_log_metric, logged), "log_extra": partial(_log_extra, logged)})
        returned = self._function(**{**self.given(samples), **loggers, **self._kwargs})

        def values(value: Any) -> list[Any]:
            listed = zip(_listed(value, len(samples)), logged, strict=True)
            return [one if one is None or not facts else {**facts, "score": one} for one, facts in listed]

        return PendingCall(returned, values)


_MARKS = {"solution_str": Verl, "solution_strs": VerlBatch, "completions": Trl, "completion_ids": Trl}
"""Parameter -> calling convention that it indicates."""


def _ground_truth(sample: Sample) -> Any:
    """Returns the ground truth of a row in verl's format, of any type; else the answer."""
    model = sample.row.get("reward_model")
    return model["ground_truth"] if isinstance(model, Mapping) and "ground_truth" in model else sample.answer


def _extra_info(sample: Sample) -> dict[str, Any]:
    own = sample.row.get("extra_info")
    return {
        **(own if isinstance(own, Mapping) else {}),
        "num_turns": TURNS * sample.extra.get(NUM_TURNS, 1),
        "rollout_reward_scores": {},
    }


def _completion(sample: Sample) -> Any:
    """Returns the response as TRL passes it: a text, or for chat prompts a list with the assistant's message."""
    return sample.text if isinstance(sample.question, str) else [{"role": "assistant", "content": sample.text}]


def _log_metric(logged: list[dict[str, Any]], name: str, value: float) -> None:
    for one in logged:
        one[name] = value


def _log_extra(logged: list[dict[str, Any]], column: str, values: Any) -> None:
    for one, value in zip(logged, _listed(values, len(logged)), strict=True):
        one[column] = value


def _listed(values: Any, count: int) -> list[Any]:
    """Converts a list or an array into a list of `count` values; raises ValueError for anything else."""
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__") or len(values) != count:
        each = "one value for one response" if count == 1 else f"{count} values, one for each response"
        raise ValueError(f"it returned {type(values).__name__} {repr(values)[:80]}, expected a list of {each}")
    return [values[place] for place in range(count)]


def _is_async(function: Callable[..., Any]) -> bool:
    """Returns whether a function, or the `__call__` of an object, is a coroutine function."""
    function = function.func if isinstance(function, partial) else function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
