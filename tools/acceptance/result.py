"""Data classes of an acceptance test: a check, the spec of a session, the result of a check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["works", "fails", "skipped"]
Facts = dict[str, object]


class CheckError(Exception):
    """Raised by a check that failed, with the facts it had found."""

    def __init__(self, said: str, facts: Facts | None = None) -> None:
        super().__init__(said)
        self.facts = facts or {}


class NotHereError(Exception):
    """Raised by a check that cannot run on this machine, with the reason."""


@dataclass(frozen=True)
class Check:
    """Check of an acceptance test, a line of the report.

    Attributes:
        session: Session in which it runs.
        asks: Question that it answers.
        means: Meaning of a failure.
        remedy: What to do after a failure.
    """

    session: str
    asks: str
    means: str
    remedy: str


@dataclass(frozen=True)
class Spec:
    """Work of a session, the content of the file on its command line.

    Attributes:
        config: Path of the run's config.
        overrides: Overrides of the session.
        checks: Names of the checks, in order.
        lines: File to which a JSON line per event is appended.
        folder: Folder for the engine's results.
        module: Module with the checks' `FUNCTIONS`, and `opened`, which yields their fixture.
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
    """Result of a check.

    Attributes:
        engine: Engine, or another subject.
        check: Name of the check.
        status: "works", "fails" or "skipped".
        said: Error message or reason; "" if it works.
        facts: Measurements and findings.
        took_s: Duration of the check, s.
        log: Path of the log.
        late: True if it was ended at its time limit, so that its question is not answered.
    """

    engine: str
    check: str
    status: Status
    said: str
    facts: Facts
    took_s: float = 0.0
    log: str = ""
    late: bool = False
