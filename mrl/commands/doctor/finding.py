"""What a check says: one finding is one line of the doctor's table.

Owns the three levels, and that a check which fails says so instead of ending the doctor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from mrl.errors import UserError, first_line

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        level: "warning": a run may be slow or stop later; "problem": it will not work.
        topic: What was looked at.
        found: What was found.
        advice: What to do about it; "" where nothing is to be done, or where `found` says it.
        where: Hosts or ranks; "" until several are put together.
    """

    level: Level
    topic: str
    found: str
    advice: str = ""
    where: str = ""


def ok(topic: str, found: str) -> Finding:
    """All is well."""
    return Finding("ok", topic, found)


def warning(topic: str, found: str, advice: str) -> Finding:
    """A run may be slow, or stop later."""
    return Finding("warning", topic, found, advice)


def problem(topic: str, found: str, advice: str) -> Finding:
    """A run will not work."""
    return Finding("problem", topic, found, advice)


def findings_of(topic: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What a check finds; where it fails, what it found until then and that it failed."""
    found: list[Finding] = []
    try:
        for each in check():
            found.append(each)  # not a comprehension: what came before a failure is kept
    except UserError as error:
        found.append(problem(topic, str(error), ""))
    except Exception as error:  # noqa: BLE001 -- whatever it is, the other checks go on
        what = f"{type(error).__name__}: {first_line(error)}"
        found.append(
            warning(topic, f"this check itself failed: {what}", "look at it by hand; the other checks went on")
        )
    return found
