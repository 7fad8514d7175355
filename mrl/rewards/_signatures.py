"""How a reward function is called: by mrl's signature, verl's or TRL's, told apart by the names of its parameters.

Owns the sample, what each of the three is given of it, and what it may return. verl 0.9.1
(`reward_manager/naive.py` of its reward loop) calls `compute_score(data_source, solution_str, ground_truth,
extra_info)`; TRL 1.16 (`GRPOTrainer._calculate_rewards`) calls `reward(prompts, completions, completion_ids,
**columns)` with lists, here with lists of one. Imports no torch.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Arguments = dict[str, Any]

NUM_TURNS = "num_turns"
"""Of an episode in `extra`: the policy's turns."""

TURNS = 2
"""Of a prompt and a response: verl's `extra_info["num_turns"]`, which counts both sides of a conversation."""

UNKNOWN_HERE = ("trainer_state", "environments")
"""What TRL also gives, and a worker process cannot know."""


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


class Signature:
    """A function and how it wants to be called: `Signature.of` finds it out."""

    style = "mrl"

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        """Args: kwargs: The config's; they win over what is given with a sample.

        Raises:
            TypeError: The function does not take these arguments.
        """
        self._function = function
        self._kwargs = dict(kwargs)
        self.parameters = inspect.signature(function)
        self._takes_all = any(one.kind is one.VAR_KEYWORD for one in self.parameters.parameters.values())
        self._loop: asyncio.AbstractEventLoop | None = None
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
            for kind, mark in ((Verl, "solution_str"), (VerlBatch, "solution_strs"), (Trl, "completions")):
                if mark in names:
                    return kind(function, kwargs)
        return Signature(function, kwargs)

    def check(self) -> None:
        """Raises TypeError where the function does not take what it will be given."""
        self.parameters.bind(prompt="", response="", answer=None, extra={}, **self._kwargs)

    def given(self, sample: Sample) -> Arguments:
        """What the function is told of a sample, besides the config's arguments."""
        return {
            "prompt": sample.prompt,
            "response": sample.response,
            "answer": sample.answer,
            "extra": dict(sample.extra),
            **self._kwargs,
        }

    def __call__(self, sample: Sample) -> Any:
        """What the function says of a sample: a number, a mapping with "score", or None for no opinion.

        A coroutine is run to its end, in one loop for all samples.
        """
        value = self._function(**self.given(sample))
        if inspect.isawaitable(value):
            self._loop = self._loop or asyncio.new_event_loop()
            value = self._loop.run_until_complete(_result(value))
        return value

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

    def given(self, sample: Sample) -> Arguments:
        """See `Signature.given`."""
        values = (sample.data_source, sample.text, _ground_truth(sample), _extra_info(sample))
        return {**self._taken(dict(zip(self.names, map(self._as_given, values), strict=True))), **self._kwargs}

    def _as_given(self, value: Any) -> Any:
        return value


class VerlBatch(Verl):
    """The function of verl's batch reward manager: lists in, a list out; here of one."""

    names = ("data_sources", "solution_strs", "ground_truths", "extra_infos")

    def _as_given(self, value: Any) -> Any:
        return [value]

    def __call__(self, sample: Sample) -> Any:
        """See `Signature.__call__`."""
        return _only(super().__call__(sample))


class Trl(Signature):
    """TRL's reward function; the other columns of the row go to it as lists of one, and the answer."""

    style = "TRL"

    def check(self) -> None:
        """See `Signature.check`. Columns are known with the rows only."""
        for name, one in self.parameters.parameters.items():
            if one.default is one.empty and name in UNKNOWN_HERE:
                raise TypeError(f"it needs '{name}' of TRL's trainer, which there is not in a worker process")
            if one.kind is one.POSITIONAL_ONLY:
                raise TypeError(f"its parameter '{name}' cannot be given by name")
        if unknown := set(self._kwargs) - set(self._taken(self._kwargs)):
            raise TypeError(f"got an unexpected keyword argument '{min(unknown)}'")

    def given(self, sample: Sample) -> Arguments:
        """See `Signature.given`."""
        chat = not isinstance(sample.question, str)
        said = [{"role": "assistant", "content": sample.text}] if chat else sample.text
        names = {name for name in sample.row if name not in ("prompt", "completion", "completion_ids")}
        many: Arguments = {"answer": [sample.answer]} | {name: [sample.row[name]] for name in names}
        many |= {"prompts": [sample.question], "completions": [said], "completion_ids": [list(sample.response_ids)]}
        many |= {"log_metric": self._log_metric, "log_extra": self._log_extra}
        return {**self._taken(many), **self._kwargs}

    def __call__(self, sample: Sample) -> Any:
        """See `Signature.__call__`; numbers that the function logs come in the mapping."""
        self._logged: dict[str, Any] = {}
        value = _only(super().__call__(sample))
        return {**self._logged, "score": value} if self._logged and value is not None else value

    def _log_metric(self, name: str, value: float) -> None:
        self._logged[name] = value

    def _log_extra(self, column: str, values: list[Any]) -> None:
        self._logged[column] = _only(values)


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


def _only(values: Any) -> Any:
    """The one value of a list, or of an array; ValueError where it is none."""
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__") or len(values) != 1:
        shown = repr(values)[:80]
        raise ValueError(f"it returned {type(values).__name__} {shown}, expected a list of one value for one response")
    return values[0]


async def _result(value: Any) -> Any:
    return await value
