"""A reward function bound to the config's arguments, and the checked outcome of a call.

Used by the trainer's process and by the workers. Imports no torch.
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
from mrl.config.user_code import is_user_code
from mrl.errors import UserError
from mrl.rewards._arguments import check_types
from mrl.rewards._signatures import Sample, Signature

Facts = dict[str, float | str]
"""Additional values that a reward function returns for a sample; numbers are finite."""

SCORE = "score"
"""Key of the score in a returned mapping, as in verl."""

GIVEN = (
    "it is called with the keywords prompt, response, answer and extra, or with those of verl (solution_str, "
    "ground_truth ...) or TRL (completions ...)"
)

MAX_FACTS = 32
"""Limit of the keys that a function returns, because they become metric names."""

MAX_FACT_CHARS = 2000
"""Length at which returned texts are cut, characters."""


@dataclass(frozen=True)
class Outcome:
    """Result of scoring one sample with one function.

    Attributes:
        value: Finite score; NaN if the call failed.
        error: Reason of the failure; "" if the call succeeded.
        lost: True if the worker process died or is no longer usable.
        given: False if the function abstained (TRL's None); `value` is 0 then.
        facts: Other values of a returned mapping, such as verl's "acc" and "pred".
    """

    value: float
    error: str = ""
    lost: bool = False
    given: bool = True
    facts: Facts = field(default_factory=dict)

    @property
    def score(self) -> float | None:
        """The value; None if the function abstained."""
        return self.value if self.given else None

    @property
    def as_json(self) -> float | dict[str, Any]:
        """JSON form: the value if all other attributes are defaults, else a mapping of the attributes."""
        plain = self.given and not (self.facts or self.error or self.lost)
        return self.value if plain else dict(vars(self))


@dataclass(frozen=True)
class CallStyle:
    """Calling style of a function.

    Attributes:
        takes_lists: True if it takes lists of samples, False if it takes one sample per call.
        is_async: True for a coroutine function, whose calls can run concurrently.
    """

    takes_lists: bool = False
    is_async: bool = False


class RewardCall:
    """A reward function that the config names, with its kwargs."""

    def __init__(self, name: str, kwargs: Mapping[str, Any]) -> None:
        """Imports the function and checks its arguments.

        Raises:
            UserError: The function does not exist, or does not accept these arguments or their values.
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
                f"reward.functions: '{name}' cannot be called: {error}.{_unknown(self._function, self._kwargs)} Its "
                f"parameters are {_parameters(self._function)}; {GIVEN}, and with the config's kwargs {self._kwargs}."
            ) from error
        self._check_values()

    def _check_values(self) -> None:
        """Raises UserError for kwargs that can only fail, such as a pattern that does not compile."""
        own = is_user_code(self.name)
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
        """Digest of the function's source file, see `source_digest`."""
        return source_digest(self._function)

    @property
    def style(self) -> CallStyle:
        """Calling style of the function."""
        return CallStyle(takes_lists=self._signature.takes_lists, is_async=self._signature.is_async)

    def __call__(
        self, samples: Sequence[Sample], wait: Callable[[Coroutine[Any, Any, Any]], Any] | None = None
    ) -> list[Outcome]:
        """Scores one sample, or several if the function takes lists.

        An exception or an unusable return value becomes `Outcome.error` of every sample.

        Args:
            samples: One sample, or several if the function takes lists.
            wait: Runs a coroutine to its end; None for `asyncio.run`.

        Raises:
            MemoryError: The function ran out of memory; the process should not be used again.
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

    async def call_async(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Scores samples with a coroutine function, so that several calls can run concurrently."""
        try:
            started = self._signature.start(samples)
            values = started.values(await started.returned)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - see `__call__`
            return [Outcome(math.nan, f"{type(error).__name__}: {error}")] * len(samples)
        return [self._outcome(value) for value in values]

    def _outcome(self, value: Any) -> Outcome:
        if value is None and self._signature.convention == "TRL":
            return Outcome(0.0, given=False)
        try:
            fields = dict(value) if isinstance(value, Mapping) else {SCORE: value}
            return Outcome(_score(fields, value), facts=_facts(fields) if isinstance(value, Mapping) else {})
        except ValueError as error:
            return Outcome(math.nan, f"it returned {error}")
        except Exception as error:  # noqa: BLE001 - a returned object may raise too, such as a tensor of two elements
            return Outcome(math.nan, f"it returned {_shown(value)}: {type(error).__name__}: {error}")


async def _result(value: Any) -> Any:
    return await value


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    import asyncio  # takes half of a worker's start-up time, and few functions are asynchronous

    return asyncio.run(coroutine)


def source_digest(thing: object) -> str:
    """Returns a digest of the file that defines a function, a class or an object's class; "" if it has none."""
    thing = inspect.unwrap(thing) if callable(thing) else thing
    try:
        known = inspect.isroutine(thing) or inspect.isclass(thing)
        path = inspect.getsourcefile(thing if known else type(thing))  # type: ignore[arg-type]
        return blake2b(Path(path or "").read_bytes(), digest_size=16).hexdigest()
    except (OSError, TypeError, ValueError):
        return ""


def _unknown(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> str:
    """Returns " It has no ..." for each argument that the function lacks, with the most similar parameter name."""
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


def _score(fields: Mapping[Any, Any], value: object) -> float:
    """Returns the score of a mapping; raises ValueError unless it is a finite number."""
    if SCORE not in fields:
        raise ValueError(f"{_shown(value)}, a mapping without '{SCORE}'")
    score = fields[SCORE]
    if not _is_number(score):
        raise ValueError(f"{_shown(score)}, expected a number")
    if not math.isfinite(score):
        raise ValueError(f"{float(score)}")
    return float(score)


def _facts(fields: Mapping[Any, Any]) -> Facts:
    """Returns the texts and finite numbers of a mapping; raises ValueError for keys that cannot name metrics."""
    kept = {key: value for key, value in fields.items() if isinstance(value, str) or _is_number(value)}
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
