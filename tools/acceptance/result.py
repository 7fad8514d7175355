"""Data types of an acceptance run: a check, the specification of a session, and the result of a check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["works", "fails", "skipped"]
Facts = dict[str, object]


class CheckError(Exception):
    """Failure of a check, with the facts found before it."""

    def __init__(self, said: str, facts: Facts | None = None) -> None:
        super().__init__(said)
        self.facts = facts or {}


class NotHereError(Exception):
    """Reason a check cannot run on this machine."""


@dataclass(frozen=True)
class Check:
    """One row of the page.

    Attributes:
        session: Session that runs the check.
        asks: Question that the check answers.
        means: Consequence of a failure.
        remedy: Advice after a failure.
    """

    session: str
    asks: str
    means: str
    remedy: str


@dataclass(frozen=True)
class Spec:
    """Specification of a session, the JSON file on its command line.

    Attributes:
        config: Path of the run's config.
        overrides: Config overrides of the session.
        checks: Names of the checks, in order.
        lines: Path of the log to which each event appends a line.
        folder: Output folder of the engine.
        module: Module with the checks' `FUNCTIONS`, and `opened`, which creates their fixture.
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
        engine: Engine or other subject of the check.
        check: Name of the check.
        status: "works", "fails" or "skipped".
        said: Message; of a failure, its reason.
        facts: Measured values and findings.
        took_s: Duration of the check alone, seconds.
        log: Path of the log with details.
        late: True if it was stopped at its time limit, so that its question is not answered.
    """

    engine: str
    check: str
    status: Status
    said: str
    facts: Facts
    took_s: float = 0.0
    log: str = ""
    late: bool = False
