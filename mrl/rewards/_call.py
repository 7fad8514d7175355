"""One reward function with its arguments, and what a call of it gives.

Owns the checks around a call; the trainer's process and the workers share them. Imports no torch.
"""

from __future__ import annotations

import inspect
import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mrl import registry
from mrl.errors import UserError

IGNORED = {signal.SIGINT, signal.SIGUSR1, signal.SIGTERM}
"""Signals that a terminal or a scheduler sends to every process of a job: a worker leaves them to its parent."""


@dataclass(frozen=True)
class Sample:
    """What a reward function sees; see `base.RewardFunction`."""

    prompt: str
    response: str
    answer: str | None
    extra: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a call gave.

    Attributes:
        value: Finite, or NaN where the call failed.
        error: Why it failed; "" where it did not.
        lost: It took its worker process with it.
    """

    value: float
    error: str = ""
    lost: bool = False


class RewardCall:
    """A reward function that the config names, ready to be called."""

    def __init__(self, name: str, kwargs: Mapping[str, Any]) -> None:
        """Imports the function and checks its arguments.

        Raises:
            UserError: There is no such function, or it does not take these arguments.
        """
        self.name = name
        self._function: Callable[..., Any] = registry.find("rewards", name, "REWARD")
        self._kwargs = dict(kwargs)
        if not callable(self._function):
            raise UserError(f"reward.functions: '{name}' is a {type(self._function).__name__}, expected a function.")
        signature: inspect.Signature | str = "..."
        try:
            signature = inspect.signature(self._function)
            signature.bind(prompt="", response="", answer=None, extra={}, **self._kwargs)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"reward.functions: '{name}' cannot be called: {error}. It takes {signature}; the config's kwargs are "
                f"{self._kwargs}, and prompt, response, answer and extra are given by keyword."
            ) from error

    def __call__(self, sample: Sample) -> Outcome:
        """The value of a sample; whatever the function does wrong becomes `Outcome.error`."""
        try:
            value = self._function(
                prompt=sample.prompt,
                response=sample.response,
                answer=sample.answer,
                extra=dict(sample.extra),
                **self._kwargs,
            )
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything
            return Outcome(math.nan, f"{type(error).__name__}: {error}")
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
            return Outcome(math.nan, f"it returned {_shown(value)}, expected a number")
        number = float(value)
        return Outcome(number) if math.isfinite(number) else Outcome(math.nan, f"it returned {number}")


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:80]}"
