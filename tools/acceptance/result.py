"""What the parts of an acceptance run hand to each other: a check, what a session is to do, what came of a check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["works", "fails", "skipped"]
Facts = dict[str, object]


class CheckError(Exception):
    """What a check found to be wrong, and what else it had found."""

    def __init__(self, said: str, facts: Facts | None = None) -> None:
        super().__init__(said)
        self.facts = facts or {}


class NotHereError(Exception):
    """Why a check cannot be made here."""


@dataclass(frozen=True)
class Check:
    """One line of the page.

    Attributes:
        session: In which it is asked.
        asks: The question.
        means: What it means that it fails.
        remedy: What to do then.
    """

    session: str
    asks: str
    means: str
    remedy: str


@dataclass(frozen=True)
class Spec:
    """What a session is to do; the file of its command line.

    Attributes:
        config: File of the run's config.
        overrides: Of the session.
        checks: In their order.
        lines: File that grows by a line with each event.
        folder: Of the engine's results.
        module: Has the checks' `FUNCTIONS`, and `opened`, which makes what they look at.
        tools: Folder of the repository's tools.
    """

    config: str
    overrides: Sequence[str]
    checks: Sequence[str]
    lines: str
    folder: str
    module: str
    tools: str


@dataclass(frozen=True)
class Result:
    """What came of a check.

    Attributes:
        engine: That was looked at, or another subject.
        check: Its name.
        status: In one word.
        said: In words; of a failure, what failed.
        facts: Figures and findings.
        took_s: The check alone, s.
        log: File that has the details.
        late: It was ended at its time limit, which says nothing of what it asks.
    """

    engine: str
    check: str
    status: Status
    said: str
    facts: Facts
    took_s: float = 0.0
    log: str = ""
    late: bool = False
