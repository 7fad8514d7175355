"""How a reward function is called: by mrl's signature, verl's or TRL's, told apart by the names of its parameters.

Owns the sample, what each of the three is given of it, and what it may return. verl 0.9.1
(`reward_manager/naive.py` of its reward loop) calls `compute_score(data_source, solution_str, ground_truth,
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
"""Of an episode in `extra`: the policy's turns."""

TURNS = 2
"""Of a prompt and a response: verl's `extra_info["num_turns"]`, which counts both sides of a conversation."""

UNKNOWN_HERE = ("trainer_state", "environments")
"""What TRL also gives, and a worker process cannot know."""

_OWN = ("prompt", "completion", "completion_ids")
"""Columns that TRL's functions get under another name."""


@dataclass(frozen=True)
class Sample:
    """What a reward function sees; see `base.RewardFunction`."""

    prompt: str
    response: str
    answer: str | None
    extra: dict[str, Any]
    text: str = ""
    """The response without special tokens, as verl and TRL give it."""
    response_ids: tuple[int, ...] = ()
    question: str | list[dict[str, Any]] = ""
    """The prompt as the data have it: a text, or chat messages."""
    data_source: str = ""
    row: dict[str, Any] = field(default_factory=dict)
    """All columns of the data row."""


@dataclass(frozen=True)
class Started:
    """A call of a reward function.

    Attributes:
        returned: By the function, or what has to be awaited for that.
        values: Makes of what was returned, for each sample, a number, a mapping with "score", or None for no opinion;
            ValueError where it is no list with a value for each sample.
    """

    returned: Any
    values: Callable[[Any], list[Any]]


class Signature:
    """A function and how it wants to be called: `Signature.of` finds it out."""

    style = "mrl"
    takes_lists = False
    """Whether it is called with lists that hold several samples."""

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        """Args: kwargs: The config's; they win over what is given with a sample.

        Raises:
            TypeError: The function does not take these arguments.
        """
        self._function = function
        self._kwargs = dict(kwargs)
        self.parameters = inspect.signature(function)
        self._takes_all = any(one.kind is one.VAR_KEYWORD for one in self.parameters.parameters.values())
        self.is_async = _is_async(function)
        self.check()

    @staticmethod
    def of(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Signature:
        """The function by the names of its parameters.

        Raises:
            TypeError: It does not take what such a function is given.
            ValueError: It has no signature.
        """
        names = set(inspect.signature(function).parameters)
        if "response" not in names:
            for mark, kind in _MARKS.items():
                if mark in names:
                    return kind(function, kwargs)
        return Signature(function, kwargs)

    def check(self) -> None:
        """Raises TypeError where the function does not take what it will be given."""
        self.parameters.bind(prompt="", response="", answer=None, extra={}, **self._kwargs)

    def given(self, samples: Sequence[Sample]) -> Arguments:
        """What the function is told of one sample, or of several where it takes lists, without the config's."""
        (sample,) = samples
        return {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer} | {
            "extra": dict(sample.extra)
        }

    def start(self, samples: Sequence[Sample]) -> Started:
        """Calls the function; what it raises is raised."""
        returned = self._function(**{**self.given(samples), **self._kwargs})
        return Started(returned, lambda value: _listed(value, len(samples)) if self.takes_lists else [value])

    def _taken(self, arguments: Arguments) -> Arguments:
        """Those that the function has a parameter for; all where it takes `**kwargs`."""
        return arguments if self._takes_all else {k: v for k, v in arguments.items() if k in self.parameters.parameters}


class Verl(Signature):
    """verl's `compute_score`; parameters that it lacks are not given."""

    style = "verl"
    names = ("data_source", "solution_str", "ground_truth", "extra_info")

    def check(self) -> None:
        """See `Signature.check`."""
        self.parameters.bind(**{**self._taken(dict.fromkeys(self.names)), **self._kwargs})

    def given(self, samples: Sequence[Sample]) -> Arguments:
        """See `Signature.given`."""
        columns = [(one.data_source, one.text, _ground_truth(one), _extra_info(one)) for one in samples]
        values = [list(column) for column in zip(*columns, strict=True)] if self.takes_lists else columns[0]
        return self._taken(dict(zip(self.names, values, strict=True)))


class VerlBatch(Verl):
    """The function of verl's batch reward manager: lists in, a list out."""

    names = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
    takes_lists = True


class Trl(Signature):
    """TRL's reward function; the other columns of the rows go to it as lists, and the answers."""

    style = "TRL"
    takes_lists = True

    def check(self) -> None:
        """See `Signature.check`. Columns are known with the rows only."""
        for name, one in self.parameters.parameters.items():
            if one.default is one.empty and name in UNKNOWN_HERE:
                raise TypeError(f"it needs '{name}' of TRL's trainer, which there is not in a worker process")
            if one.kind is one.POSITIONAL_ONLY:
                raise TypeError(f"its parameter '{name}' cannot be given by name")
        if unknown := set(self._kwargs) - set(self._taken(self._kwargs)):
            raise TypeError(f"got an unexpected keyword argument '{min(unknown)}'")

    def given(self, samples: Sequence[Sample]) -> Arguments:
        """See `Signature.given`."""
        names = {name: None for one in samples for name in one.row if name not in _OWN}
        many: Arguments = {"answer": [one.answer for one in samples]}
        many |= {name: [one.row.get(name) for one in samples] for name in names}
        many |= {"prompts": [one.question for one in samples], "completions": [_said(one) for one in samples]}
        many |= {"completion_ids": [list(one.response_ids) for one in samples]}
        return self._taken(many)

    def start(self, samples: Sequence[Sample]) -> Started:
        """See `Signature.start`; what the function logs comes with the values."""
        logged: list[dict[str, Any]] = [{} for _ in samples]
        tell = self._taken({"log_metric": partial(_log_metric, logged), "log_extra": partial(_log_extra, logged)})
        returned = self._function(**{**self.given(samples), **tell, **self._kwargs})

        def values(value: Any) -> list[Any]:
            listed = zip(_listed(value, len(samples)), logged, strict=True)
            return [one if one is None or not facts else {**facts, "score": one} for one, facts in listed]

        return Started(returned, values)


_MARKS = {"solution_str": Verl, "solution_strs": VerlBatch, "completions": Trl, "completion_ids": Trl}
"""Parameters by which functions are known."""


def _ground_truth(sample: Sample) -> Any:
    """As verl's rows have it, of any type; else the answer."""
    model = sample.row.get("reward_model")
    return model["ground_truth"] if isinstance(model, Mapping) and "ground_truth" in model else sample.answer


def _extra_info(sample: Sample) -> dict[str, Any]:
    own = sample.row.get("extra_info")
    return {
        **(own if isinstance(own, Mapping) else {}),
        "num_turns": TURNS * sample.extra.get(NUM_TURNS, 1),
        "rollout_reward_scores": {},
    }


def _said(sample: Sample) -> Any:
    """The response as TRL gives it: a text, or the last message of a conversation."""
    return sample.text if isinstance(sample.question, str) else [{"role": "assistant", "content": sample.text}]


def _log_metric(logged: list[dict[str, Any]], name: str, value: float) -> None:
    for one in logged:
        one[name] = value


def _log_extra(logged: list[dict[str, Any]], column: str, values: Any) -> None:
    for one, value in zip(logged, _listed(values, len(logged)), strict=True):
        one[column] = value


def _listed(values: Any, count: int) -> list[Any]:
    """A list or an array of so many; ValueError where it is none."""
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__") or len(values) != count:
        each = "one value for one response" if count == 1 else f"{count} values, one for each response"
        raise ValueError(f"it returned {type(values).__name__} {repr(values)[:80]}, expected a list of {each}")
    return [values[place] for place in range(count)]


def _is_async(function: Callable[..., Any]) -> bool:
    """Whether it says of itself that what it returns has to be awaited."""
    function = function.func if isinstance(function, partial) else function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
