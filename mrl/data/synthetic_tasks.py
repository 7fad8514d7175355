"""Synthetic tasks: generators of prompts with a held-out split.

A task computes each row from its index alone, so nothing is stored and a resume needs only the index. Users add a task
by subclassing `Task` and naming it as `data.task=FILE:Class`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, TypeVar

from mrl.config import registry, user_code
from mrl.errors import UserError

_Question = TypeVar("_Question")


class Task(ABC):
    """Base class of row generators.

    Attributes:
        num_train: Number of training rows in an epoch.
        num_val: Number of held-out rows; no training row has the same question.
    """

    num_train: int
    num_val: int

    @abstractmethod
    def train_row(self, index: int) -> dict[str, Any]:
        """Returns training row 0 .. num_train-1: "prompt" (string or chat messages), "answer" and other columns."""

    @abstractmethod
    def val_row(self, index: int) -> dict[str, Any]:
        """Returns held-out row 0 .. num_val-1, with the same columns."""


class Addition(Task):
    """Sums: the prompt "<12+7+30>" has the answer "49". Training rows also have a right and a wrong response.

    A hash of the sorted terms assigns every sum to one side, so a held-out sum never appears in training, in any order
    of its terms. Training rows may repeat; held-out rows are distinct.
    """

    def __init__(
        self,
        *,
        min_terms: int = 2,
        max_terms: int = 3,
        max_value: int = 50,
        num_train: int = 100_000,
        num_val: int = 200,
        held_out_frac: float = 0.1,
        wrong_frac: float = 0.0,
        wrong_by: int = 1,
        seed: int = 0,
    ) -> None:
        """Creates the generator.

        Args:
            min_terms: Minimum number of terms of a sum, at least 1.
            max_terms: Maximum number of terms, at most 16; each number of terms is equally likely.
            max_value: Largest term; terms are uniform in 0 .. max_value.
            num_train: Training rows in an epoch.
            num_val: Number of held-out rows.
            held_out_frac: Fraction of all sums that is excluded from training, [0.01, 0.9].
            wrong_frac: Fraction of the training rows whose "response" is too high, [0, 1]. Supervised steps on
                `data.response_key=response` then give a policy that reinforcement learning can improve.
            wrong_by: Error of these responses and of the rejected response of each pair, at least 1.
            seed: Random seed of the rows and the split.

        Raises:
            UserError: A value is out of range, or there are too few held-out sums.
        """
        for name, value, low, high in (
            ("min_terms", min_terms, 1, 16),
            ("max_terms", max_terms, 1, 16),
            ("max_value", max_value, 1, 10**9),
            ("num_train", num_train, 1, 2**40),
            ("num_val", num_val, 0, 10**5),
            ("wrong_by", wrong_by, 1, 10**9),
        ):
            _check_int(name, value, low, high)
        if min_terms > max_terms:
            raise UserError(f"data.task_kwargs.min_terms={min_terms} is above max_terms={max_terms}.")
        _check_number("held_out_frac", held_out_frac, 0.01, 0.9)
        _check_number("wrong_frac", wrong_frac, 0, 1)
        possible = sum((max_value + 1) ** count for count in range(min_terms, max_terms + 1))
        if possible < num_val:
            raise UserError(
                f"data.task_kwargs.num_val is {num_val}, but there are only {possible} different sums. Lower it, or "
                "raise max_value or max_terms."
            )
        self.num_train = num_train
        self.num_val = num_val
        self._terms = (min_terms, max_terms)
        self._max_value = max_value
        self._held_out_frac = held_out_frac
        self._wrong_frac = wrong_frac
        self._wrong_by = wrong_by
        self._seed = seed
        self._val = _held_out(
            "sums", num_val, held_out_frac, lambda index: self._draw("val", index, 0), self._is_held_out
        )

    def train_row(self, index: int) -> dict[str, Any]:
        """Returns a sum that is not held out, with a preference pair; some rows have a "response" that is too high."""
        attempt = 0
        while self._is_held_out(terms := self._draw("train", index, attempt)):
            attempt += 1
        row = _sum_row(terms)
        row |= {"chosen": row["answer"], "rejected": str(sum(terms) + self._wrong_by)}
        if _number(self._seed, "wrong", index) < self._wrong_frac * 2**512:
            row["response"] = str(sum(terms) + self._wrong_by)
        return row

    def val_row(self, index: int) -> dict[str, Any]:
        """Returns a held-out sum."""
        return _sum_row(self._val[index])

    def _draw(self, side: str, index: int, attempt: int) -> tuple[int, ...]:
        rest = _number(self._seed, side, index, attempt)
        low, high = self._terms
        rest, extra = divmod(rest, high - low + 1)
        terms = []
        for _ in range(low + extra):
            rest, term = divmod(rest, self._max_value + 1)
            terms.append(term)
        return tuple(terms)

    def _is_held_out(self, terms: tuple[int, ...]) -> bool:
        return _number(self._seed, "split", tuple(sorted(terms))) < self._held_out_frac * 2**512


def _number(*key: object) -> int:
    """Returns a pseudo-random number below 2**512 that depends on the key alone."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=64).digest(), "little")


def _held_out(
    what: str, count: int, frac: float, draw: Callable[[int], _Question], is_held_out: Callable[[_Question], bool]
) -> list[_Question]:
    """Returns the first `count` distinct held-out questions of a stream, of which the fraction `frac` is held out.

    Raises:
        UserError: Too few were found.
    """
    found: dict[_Question, None] = {}
    tries = int(20 * (count + 100) / frac)
    for index in range(tries):
        if len(found) == count:
            break
        question = draw(index)
        if is_held_out(question):
            found[question] = None
    if len(found) < count:
        raise UserError(
            f"data.task_kwargs.num_val is {count}, but only {len(found)} different held-out {what} were found in "
            f"{tries} draws. Lower num_val, raise held_out_frac, or allow more distinct questions."
        )
    return list(found)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    """Raises UserError unless the value is an int in the range; config values come untyped (2.5 or "3")."""
    if type(value) is not int or not low <= value <= high:
        raise UserError(f"data.task_kwargs.{name} is {value!r}, expected an integer from {low} to {high}.")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if not (type(value) is int or type(value) is float) or not low <= value <= high:
        raise UserError(f"data.task_kwargs.{name} is {value!r}, expected a number from {low} to {high}.")


def _sum_row(terms: tuple[int, ...]) -> dict[str, Any]:
    total = str(sum(terms))
    return {"prompt": f"<{'+'.join(map(str, terms))}>", "answer": total, "response": total, "num_terms": len(terms)}


class Guessing(Task):
    """Games for the environment `guess`: the prompt is "<1-15>", and the game's seed chooses the number to guess.

    "response" is a game as messages: guesses and the environment's replies. A fraction of them plays binary search, the
    others guess at random.
    """

    def __init__(
        self,
        *,
        low: int = 1,
        high: int = 15,
        num_guesses: int = 4,
        num_train: int = 100_000,
        num_val: int = 64,
        right_frac: float = 0.2,
        seed: int = 0,
    ) -> None:
        """Creates the generator.

        Args:
            low: Smallest possible number.
            high: Largest possible number, above `low`.
            num_guesses: Guesses per game, at least 1.
            num_train: Training rows in an epoch.
            num_val: Number of held-out rows; all rows have the same prompt, but different games.
            right_frac: Fraction of the training rows whose "response" plays binary search, [0, 1].
            seed: Random seed of the games in the responses.

        Raises:
            UserError: A value is out of range.
        """
        for name, value, least, most in (
            ("low", low, 0, 10**9),
            ("high", high, low + 1, 10**9),
            ("num_guesses", num_guesses, 1, 1000),
            ("num_train", num_train, 1, 2**40),
            ("num_val", num_val, 0, 10**5),
        ):
            _check_int(name, value, least, most)
        _check_number("right_frac", right_frac, 0, 1)
        self.num_train, self.num_val = num_train, num_val
        self._range, self._num_guesses = (low, high), num_guesses
        self._right_frac, self._seed = right_frac, seed

    def train_row(self, index: int) -> dict[str, Any]:
        """Returns the prompt with a complete game as "response"."""
        return {**self.val_row(index), "response": self._game(index)}

    def val_row(self, index: int) -> dict[str, Any]:
        """Returns the prompt; "answer" is None, since only the environment knows the number."""
        low, high = self._range
        return {"prompt": f"<{low}-{high}>", "answer": None}

    def _game(self, index: int) -> list[dict[str, str]]:
        (low, high), rest = self._range, _number(self._seed, "game", index)
        size = high - low + 1
        rest, place = divmod(rest, size)
        plays_well = _number(self._seed, "plays", index) < self._right_frac * 2**512
        said: list[dict[str, str]] = []
        for _ in range(self._num_guesses):
            rest, other = divmod(rest, size)
            guess = (low + high) // 2 if plays_well else self._range[0] + other
            number = self._range[0] + place
            said.append({"role": "assistant", "content": str(guess)})
            if guess == number:
                return said
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
            said.append({"role": "user", "content": "higher" if guess < number else "lower"})
        return said[:-1]


class Calculating(Task):
    """Sums and products for the environment `calculator`: the prompt "<3*7+8>" has the answer "29".

    A hash assigns every question to one side, so a held-out question never appears in training. "response" is messages:
    either a calculator call in the Hermes format with its result and the final answer, or a random number.
    """

    def __init__(
        self,
        *,
        num_terms: int = 3,
        num_train: int = 100_000,
        num_val: int = 64,
        held_out_frac: float = 0.1,
        calls_frac: float = 0.3,
        seed: int = 0,
    ) -> None:
        """Creates the generator.

        Args:
            num_terms: Number of digits in a question, [2, 16].
            num_train: Training rows in an epoch.
            num_val: Number of held-out rows, all distinct.
            held_out_frac: Fraction of all questions that is excluded from training, [0.01, 0.9].
            calls_frac: Fraction of the training rows whose "response" calls the calculator, [0, 1].
            seed: Random seed of the questions and the split.

        Raises:
            UserError: A value is out of range, or there are too few held-out questions.
        """
        for name, value, least, most in (
            ("num_terms", num_terms, 2, 16),
            ("num_train", num_train, 1, 2**40),
            ("num_val", num_val, 0, 10**5),
        ):
            _check_int(name, value, least, most)
        _check_number("held_out_frac", held_out_frac, 0.01, 0.9)
        _check_number("calls_frac", calls_frac, 0, 1)
        self.num_train, self.num_val = num_train, num_val
        self._num_terms, self._calls_frac, self._seed = num_terms, calls_frac, seed
        self._held_out_frac = held_out_frac
        self._val = _held_out(
            "questions", num_val, held_out_frac, lambda index: self._question("val", index, 0), self._is_held_out
        )

    def train_row(self, index: int) -> dict[str, Any]:
        """Returns a question that is not held out, with a "response" that calls the calculator or answers at random."""
        attempt = 0
        while self._is_held_out(drawn := self._question("train", index, attempt)):
            attempt += 1
        question, answer = drawn
        says = str(_number(self._seed, "says", index) % 100)
        said = []
        if _number(self._seed, "calls", index) < self._calls_frac * 2**512:
            call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{question}"}}}}</tool_call>'
            said = [{"role": "assistant", "content": call}, {"role": "tool", "content": answer}]
            says = answer
        response = [*said, {"role": "assistant", "content": says}]
        return {"prompt": f"<{question}>", "answer": answer, "response": response}

    def val_row(self, index: int) -> dict[str, Any]:
        """Returns a held-out question."""
        question, answer = self._val[index]
        return {"prompt": f"<{question}>", "answer": answer}

    def _is_held_out(self, drawn: tuple[str, str]) -> bool:
        return _number(self._seed, "split", drawn[0]) < self._held_out_frac * 2**512

    def _question(self, side: str, index: int, attempt: int) -> tuple[str, str]:
        rest = _number(self._seed, "question", side, index, attempt)
        rest, first = divmod(rest, 9)
        products, text = [first + 1], str(first + 1)
        for _ in range(self._num_terms - 1):
            rest, times = divmod(rest, 2)
            rest, term = divmod(rest, 9)
            text += f"{'*' if times else '+'}{term + 1}"
            if times:
                products[-1] *= term + 1
            else:
                products.append(term + 1)
        return text, str(sum(products))


TASKS: Mapping[str, type[Task]] = {"addition": Addition, "guessing": Guessing, "calculating": Calculating}


def make_task(name: str, kwargs: Mapping[str, Any]) -> Task:
    """Creates the task named in `TASKS` or by a path "package.module:Class".

    Raises:
        UserError: There is no such task, or it does not accept these arguments.
    """
    if name in TASKS:
        factory = TASKS[name]
    elif user_code.is_user_code(name):
        factory = registry.find("data", name, "")
        registry.check_subclass(f"data.task: '{name}'", factory, Task)
    else:
        raise UserError(f"data.task: unknown '{name}'. Known: {', '.join(TASKS)}, or a path {user_code.FORMS}.")
    parameters = inspect.signature(factory)
    try:
        parameters.bind(**kwargs)
    except TypeError as error:
        raise UserError(
            f"data.task_kwargs: {error}. '{name}' takes: {', '.join(parameters.parameters) or 'nothing'}."
        ) from error
    task = factory(**kwargs)
    for size in ("num_train", "num_val"):
        if type(getattr(task, size, None)) is not int:
            raise UserError(f"data.task: '{name}' has no whole number {size}, the number of its rows. Set it.")
    return task
