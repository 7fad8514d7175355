"""Findings: the result of a check is one line of the doctor's report, and an exception in a check is a finding too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from mrl.errors import UserError, first_line

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        level: "ok"; "warning": a run may be slow or stop later; "problem": a run will not work.
        topic: Subject of the check.
        found: State that was found.
        advice: Remedy; "" if none is needed or `found` contains it.
        where: Hosts or ranks; "" until the findings of several hosts are merged.
    """

    level: Level
    topic: str
    found: str
    advice: str = ""
    where: str = ""


def ok(topic: str, found: str) -> Finding:
    """Returns a finding that all is well."""
    return Finding("ok", topic, found)


def warning(topic: str, found: str, advice: str) -> Finding:
    """Returns a finding that a run may be slow or stop later."""
    return Finding("warning", topic, found, advice)


def problem(topic: str, found: str, advice: str) -> Finding:
    """Returns a finding that a run will not work."""
    return Finding("problem", topic, found, advice)


def findings_of(topic: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Returns the findings of a check; an exception is added to those yielded before it."""
    found: list[Finding] = []
    try:
        for each in check():
            found.append(each)  # not a comprehension, which would lose the findings before an exception
    except UserError as error:
        found.append(problem(topic, str(error), ""))
    except Exception as error:  # noqa: BLE001 -- the other checks must run
        what = f"{type(error).__name__}: {first_line(error)}"
        found.append(
            warning(topic, f"this check itself failed: {what}", "check it by hand; the other checks are not affected")
        )
    return found
