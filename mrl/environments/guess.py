"""A number to guess: the model is told "higher" or "lower" until it finds it. Learned on a laptop, without tools."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from mrl.environments.base import Action, Environment, Observation
from mrl.errors import UserError

_NUMBER = re.compile(r"-?\d{1,18}", re.ASCII)


class Guess(Environment):
    """The number comes from the seed; the last number of a message is the guess."""

    def __init__(
        self, low: int = 1, high: int = 100, max_guesses: int = 10, found: float = 1.0, discount: float = 1.0
    ) -> None:
        """Sets the game.

        Args:
            low: Smallest number, itself included.
            high: Largest number, itself included.
            max_guesses: The game ends, without a reward, when so many were wrong.
            found: Reward of the right guess.
            discount: The reward is multiplied by this for each guess before.
        """
        if not low <= high or max_guesses < 1:
            raise UserError(
                f"guess: low={low}, high={high}, max_guesses={max_guesses}; expected low <= high, 1 guess at least."
            )
        self._range = (low, high)
        self._max_guesses = max_guesses
        self._found = found
        self._discount = discount
        self._number = low
        self._num_guesses = 0

    def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Thinks of a number; the prompt is the row's, or where that has no 'prompt' the question is asked here."""
        self._number = random.Random(seed).randint(*self._range)
        self._num_guesses = 0
        if row.get("prompt"):
            return Observation()
        low, high = self._range
        return Observation.user(f"I think of a number from {low} to {high}. Guess it.")

    def step(self, action: Action) -> Observation:
        """'higher' or 'lower'; the end where it is right, or the last guess was wrong."""
        self._num_guesses += 1
        said = _NUMBER.findall(action.text)
        guess = int(said[-1]) if said else None
        info: dict[str, float | str] = {"num_guesses": float(self._num_guesses)}
        if guess == self._number:
            reward = self._found * self._discount ** (self._num_guesses - 1)
            return Observation(reward=reward, terminated=True, info=info)
        if self._num_guesses == self._max_guesses:
            return Observation(reward=0.0, terminated=True, info=info)
        if guess is None:
            return Observation.user("Write a number.", info=info)
        return Observation.user("higher" if guess < self._number else "lower", info=info)


ENVIRONMENT = Guess
