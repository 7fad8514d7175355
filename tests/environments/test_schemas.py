"""A function's schema is the one that transformers makes of it."""

from enum import Enum
from typing import Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema

from mrl.environments._schemas import schema_of
from mrl.errors import UserError


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def nothing():
    """Does nothing."""


def plain(a: int, b: float, c: str, d: bool, e: list, f: dict, g: Any = None):
    """
    Adds it all.

    Over two paragraphs.

    Args:
        a: The first.
        b: The second: with a colon
            and a second line.
        c: The third.

        d: The fourth.
        e: The fifth.
        f: The sixth.
        g: The last.

    Returns:
        Something: else.

    Raises:
        ValueError: Never.
    """


def deep(
    a: list[int],
    b: dict[str, float],
    c: tuple[int, str],
    d: int | None,
    e: Optional[str],
    f: Union[int, str],
    g: list[int] | str,
    h: Literal["x", "y"],
    i: Literal[1, "z"],
    j: Colour = Colour.RED,
    k: list[dict[str, list[int]]] | None = None,
) -> str:
    """Looks deep.

    Args:
        a: A.
        b: B.
        c: C.
        d: D.
        e: E.
        f: F (choices: ["1", "2"])
        g: G.
        h: H.
        i: I.
        j: J.
        k: K.
    """


class Box:
    def method(self, key: str) -> int:
        """Looks a key up.

        Args:
            key: What to look up.

        Returns:
            The value.
        """
        return len(key)


@pytest.mark.parametrize("tool", [nothing, plain, deep, Box().method], ids=lambda tool: tool.__name__)
def test_it_is_what_transformers_makes(tool):
    theirs = get_json_schema(tool)
    theirs["function"].pop("return", None)  # chat templates ignore it
    assert schema_of(tool) == theirs


def no_doc(a: int):
    pass


def no_hint(a):
    """Does.

    Args:
        a: A.
    """


def not_told(a: int):
    """Does."""


def odd(a: set):
    """Does.

    Args:
        a: A.
    """


def anything(a: tuple[int, ...]):
    """Does.

    Args:
        a: A.
    """


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        (no_doc, "'no_doc' has no docstring"),
        (no_hint, "argument 'a' has no type hint"),
        (not_told, "does not describe 'a'"),
        (odd, "'a' has the type <class 'set'>"),
        (anything, "'a' has the type tuple"),
        ({"name": "f"}, "expected a function, or a schema"),
    ],
)
def test_what_it_cannot_describe_is_refused(tool, why):
    with pytest.raises(UserError, match=why):
        schema_of(tool)


def test_a_schema_stays_as_it_is():
    schema = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}
    assert schema_of(schema) == schema
