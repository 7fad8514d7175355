"""Number-guessing game with the hints "higher" and "lower". A small model learns it on a laptop, without tools."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from mrl.environments.base import Action, Environment, Observation
from mrl.errors import UserError

_NUMBER = re.compile(r"-?\d{1,18}", re.ASCII)


class Guess(Environment):
    """Guessing game; the seed determines the number, and the last number in a message is the guess."""

    def __init__(
        self, low: int = 1, high: int = 100, max_guesses: int = 10, found: float = 1.0, discount: float = 1.0
    ) -> None:
        """Sets the parameters of the game.

        Args:
            low: Smallest possible number, inclusive.
            high: Largest possible number, inclusive.
            max_guesses: Number of wrong guesses after which the game ends with reward 0.
            found: Reward of the right guess.
            discount: Factor of the reward per earlier guess.
        """
        if not low <= high or max_guesses < 1:
            raise UserError(
                f"guess: low={low}, high={high}, max_guesses={max_guesses}; expected low <= high and max_guesses >= 1."
            )
        self._range = (low, high)
        self._max_guesses = max_guesses
        self._found = found
        self._discount = discount
        self._number = low
        self._num_guesses = 0

    def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Draws the number; asks the question itself if the row has no 'prompt'."""
        self._number = random.Random(seed).randint(*self._range)
        self._num_guesses = 0
        if row.get("prompt"):
            return Observation()
        low, high = self._range
        return Observation.user(f"I think of a number from {low} to {high}. Guess it.")

    def step(self, action: Action) -> Observation:
        """Returns 'higher' or 'lower'; ends the game after the right guess or the last one."""
        self._num_guesses += 1
        numbers = _NUMBER.findall(action.text)
        guess = int(numbers[-1]) if numbers else None
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
