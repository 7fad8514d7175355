"""One reward function with its arguments, and what a call of it gives.

Owns the checks around a call; the trainer's process and the workers share them. Imports no torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mrl.config import registry
from mrl.config.did_you_mean import did_you_mean
from mrl.config.user_code import is_own
from mrl.errors import UserError
from mrl.rewards._arguments import check_types
from mrl.rewards._signatures import Sample, Signature

Facts = dict[str, float | str]
"""What a reward function may say of a sample besides its value; numbers are finite."""

SCORE = "score"
"""Key of the value where a function returns a mapping, as verl's do."""

GIVEN = (
    "prompt, response, answer and extra are given by keyword, or what verl (solution_str, ground_truth ...) or TRL "
    "(completions ...) gives"
)

MAX_FACTS = 32
"""More keys of one function are an error: they become names of metrics."""

MAX_FACT_CHARS = 2000
"""Of a longer text the rest is cut off."""


@dataclass(frozen=True)
class Outcome:
    """What a call gave.

    Attributes:
        value: Finite, or NaN where the call failed.
        error: Why it failed; "" where it did not.
        lost: It took its worker process with it.
        given: False where the function has no opinion on this sample (TRL's None); the value is 0 then.
        facts: What a function that returns a mapping says besides, such as verl's "acc" and "pred".
    """

    value: float
    error: str = ""
    lost: bool = False
    given: bool = True
    facts: Facts = field(default_factory=dict)

    @property
    def score(self) -> float | None:
        """The value; None where the function has no opinion."""
        return self.value if self.given else None

    @property
    def told(self) -> float | dict[str, Any]:
        """As JSON has it: the value where that is all, else every attribute by its name."""
        plain = self.given and not (self.facts or self.error or self.lost)
        return self.value if plain else dict(vars(self))


@dataclass(frozen=True)
class Way:
    """How a function wants to be called.

    Attributes:
        lists: With the samples of a call in lists, otherwise with one sample.
        waits: Several calls at the same time: it is a coroutine function.
    """

    lists: bool = False
    waits: bool = False


class RewardCall:
    """A reward function that the config names, ready to be called."""

    def __init__(self, name: str, kwargs: Mapping[str, Any]) -> None:
        """Imports the function and checks its arguments.

        Raises:
            UserError: There is no such function, or it does not take these arguments or their values.
        """
        self.name = name
        self._function: Callable[..., Any] = registry.find("rewards", name, "REWARD")
        self._kwargs = dict(kwargs)
        if not callable(self._function):
            raise UserError(f"reward.functions: '{name}' is a {type(self._function).__name__}, expected a function.")
        try:
            self._signature = Signature.of(self._function, self._kwargs)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"reward.functions: '{name}' cannot be called: {error}.{_unknown(self._function, self._kwargs)} It "
                f"takes {_parameters(self._function)}; the "
                f"config's kwargs are {self._kwargs}, and {GIVEN}."
            ) from error
        self._check_values()

    def _check_values(self) -> None:
        """Raises UserError where a value of the kwargs could only fail, as a pattern that does not compile."""
        own = is_own(self.name)
        check = getattr(self._function, "check_kwargs", None) if own else None
        if not own:
            check = registry.find("rewards", self.name, "CHECK", default=None)
        try:
            check_types(self._function, self._kwargs, own=own)
            if check is not None:
                check(**self._kwargs)
        except (ValueError, TypeError) as error:
            raise UserError(f"reward.functions: '{self.name}': kwargs: {error}.") from error

    @property
    def source(self) -> str:
        """See `source_of`."""
        return source_of(self._function)

    @property
    def way(self) -> Way:
        """How it wants to be called."""
        return Way(lists=self._signature.takes_lists, waits=self._signature.is_async)

    def __call__(
        self, samples: Sequence[Sample], wait: Callable[[Coroutine[Any, Any, Any]], Any] | None = None
    ) -> list[Outcome]:
        """The value of a sample, or of each of several where it takes lists.

        Whatever the function does wrong becomes `Outcome.error` of each.

        Args:
            samples: One, or more.
            wait: Runs a coroutine to its end; None: in a loop of its own.

        Raises:
            MemoryError: Nobody knows then what the process still holds.
        """
        try:
            started = self._signature.start(samples)
            awaited = inspect.isawaitable(started.returned)
            values = started.values((wait or _run)(_result(started.returned)) if awaited else started.returned)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything
            return [Outcome(math.nan, f"{type(error).__name__}: {error}")] * len(samples)
        return [self._outcome(value) for value in values]

    async def later(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The same of a function that waits, beside others."""
        try:
            started = self._signature.start(samples)
            values = started.values(await started.returned)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - see `__call__`
            return [Outcome(math.nan, f"{type(error).__name__}: {error}")] * len(samples)
        return [self._outcome(value) for value in values]

    def _outcome(self, value: Any) -> Outcome:
        if value is None and self._signature.style == "TRL":
            return Outcome(0.0, given=False)
        try:
            said = dict(value) if isinstance(value, Mapping) else {SCORE: value}
            return Outcome(_score(said, value), facts=_facts(said) if isinstance(value, Mapping) else {})
        except ValueError as error:
            return Outcome(math.nan, f"it returned {error}")
        except Exception as error:  # noqa: BLE001 - and so may what it returned, such as a tensor of two elements
            return Outcome(math.nan, f"it returned {_shown(value)}: {type(error).__name__}: {error}")


async def _result(value: Any) -> Any:
    return await value


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    import asyncio  # half of a worker's start, and few functions wait

    return asyncio.run(coroutine)


def source_of(thing: object) -> str:
    """Digest of the file that defines a function, a class or an object's class; "" where there is none to read."""
    thing = inspect.unwrap(thing) if callable(thing) else thing
    try:
        known = inspect.isroutine(thing) or inspect.isclass(thing)
        path = inspect.getsourcefile(thing if known else type(thing))  # type: ignore[arg-type]
        return blake2b(Path(path or "").read_bytes(), digest_size=16).hexdigest()
    except (OSError, TypeError, ValueError):
        return ""


def _unknown(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> str:
    """Returns " It has no ..." for each argument that the function lacks, with the nearest that it has."""
    try:
        known = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ""
    return "".join(f" It has no '{name}'.{did_you_mean(name, known)}" for name in kwargs if name not in known)


def _parameters(function: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "..."


def _score(said: Mapping[Any, Any], value: object) -> float:
    """The value itself; ValueError says what came instead of a finite number."""
    if SCORE not in said:
        raise ValueError(f"{_shown(value)}, a mapping without '{SCORE}'")
    score = said[SCORE]
    if not _is_number(score):
        raise ValueError(f"{_shown(score)}, expected a number")
    if not math.isfinite(score):
        raise ValueError(f"{float(score)}")
    return float(score)


def _facts(said: Mapping[Any, Any]) -> Facts:
    """The texts and finite numbers of a mapping; ValueError where their names cannot become names of metrics."""
    kept = {key: value for key, value in said.items() if isinstance(value, str) or _is_number(value)}
    if len(kept) > MAX_FACTS:
        raise ValueError(f"a mapping with {len(kept)} keys, expected at most {MAX_FACTS}")
    for key in kept:
        if not (isinstance(key, str) and key.strip() and key.isprintable()):
            raise ValueError(f"a mapping with the key {_shown(key)}, expected a name")
    return {
        key: value[:MAX_FACT_CHARS] if isinstance(value, str) else float(value)
        for key, value in kept.items()
        if isinstance(value, str) or math.isfinite(value)
    }


def _is_number(value: object) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, (str, bytes))


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:80]}"
