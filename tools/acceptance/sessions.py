"""Sessions of an acceptance run: checks in separate processes, so that a crash or hang does not affect the others.

Manages the processes, their time limits and the results; `trtllm.py`, `vllm.py` and `gpu.py` start sessions, and
`session.py` is the program in a session's process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from acceptance.result import Check, Result, Spec, Status
from mrl.config.config import Config, load
from mrl.errors import UserError

END_S = 10.0
"""Time between SIGTERM and SIGKILL, seconds."""

BEAT_S = 0.2
TAIL_LINES = 15
MOST_CHARS = 300


@dataclass(kw_only=True)
class Sessions:
    """Base class of acceptance runs.

    Attributes:
        folder: Output folder.
        tools: Folder of the repository's tools.
        known: All checks by name.
        module: Module with the checks' `FUNCTIONS`, for `session.py`.
        checks: Names of the checks to run.
        overrides: Config overrides of all sessions.
        start_timeout_s: Time limit for the start of a session, seconds.
        timeout_s: Time limit of a check, seconds.
        tell: Callback for progress lines.
    """

    folder: Path
    tools: Path
    known: Mapping[str, Check]
    module: str
    checks: Sequence[str]
    overrides: Sequence[str] = ()
    start_timeout_s: float = 300.0
    timeout_s: float = 120.0
    tell: Callable[[str], None] = field(default=lambda line: None)

    def __post_init__(self) -> None:
        """Creates the folders.

        Raises:
            UserError: A check is unknown, or the folder already has a run.
        """
        check_names("check", self.checks, self.known)
        if (self.folder / "config.yaml").exists():
            raise UserError(f"'{self.folder}' has an acceptance run already. Name another --output_dir.")
        self.folder = self.folder.resolve()
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self.results: list[Result] = []
        self._stop = threading.Event()

    def stop(self) -> None:
        """Ends the running sessions of all threads and starts no others; their unfinished checks get no result."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        """True after `stop` was called."""
        return self._stop.is_set()

    def load(self, more: Sequence[str]) -> Config:
        """Returns the run's config with more overrides."""
        return load(self.folder / "config.yaml", [*self.overrides, *more])

    # sessions

    def session(
        self,
        engine: str,
        session: str,
        wanted: Sequence[str],
        overrides: Sequence[str],
        *,
        launcher: Sequence[str] = (),
        unstarted: Status = "skipped",
    ) -> None:
        """Runs the checks of a session, restarting its process after a check that ended it.

        Args:
            engine: Subject of the checks, whose output folder exists.
            session: Name of the session, used for the log.
            wanted: Names of the checks, possibly including "start" and "end".
            overrides: Config overrides of the session.
            launcher: Words in front of the command.
            unstarted: Status of the checks if the session does not start; "start" itself fails.
        """
        left = [name for name in wanted if name not in ("start", "end")]
        for number in range(len(left) + 1):
            name = f"{engine}-{session}" + (f"-{number + 1}" if number else "")
            log, lines = self.folder / "logs" / f"{name}.log", self.folder / "logs" / f"{name}.jsonl"
            spec = Spec(
                config=str(self.folder / "config.yaml"),
                overrides=[*self.overrides, *overrides, f"run.output_dir={self.folder / engine / name}"],
                checks=left,
                lines=str(lines),
                folder=str(self.folder / engine),
                module=self.module,
                tools=str(self.tools),
            )
            file = lines.with_suffix(".json")
            file.write_text(json.dumps(asdict(spec), indent=1), encoding="utf-8")
            lines.touch()
            words = [*launcher, sys.executable, "-m", "acceptance.session", str(file)]
            at, said, late = self._watch(words, log, lines, engine, wanted)
            if not said or self.stopped:
                return
            again = at == "start" and self.has(engine, "start")  # a restart after a check that ended the process
            if at in wanted and not again:
                self.add(Result(engine, at, "fails", said, {}, log=str(log), late=late))
            if at == "start":
                rest = [name for name in wanted if not self.has(engine, name)]
                why = "it did not start" + (f": {said}" if again or "start" not in wanted else "")
                self.give_up(engine, rest, unstarted, why, log)
                return
            if at == "end":
                return
            left = left[left.index(at) + 1 :]
            if not left:
                return

    def _watch(
        self, words: Sequence[str], log: Path, lines: Path, engine: str, wanted: Sequence[str]
    ) -> tuple[str, str, bool]:
        """Waits for a session; returns its last check, why it ended there ("" if it completed), and if it timed out."""
        at, seen, since = "start", 0, time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, stdout=output, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
            )
        try:
            while True:
                status = process.poll()
                complete = lines.read_text(encoding="utf-8").split("\n")[:-1]  # the last line may be incomplete
                found = [json.loads(line) for line in complete]
                for line in found[seen:]:
                    at, since = line.get("begins", at), time.monotonic()
                    if line.get("ended") in wanted and not self.has(engine, line["ended"]):
                        status_, said, facts = line["outcome"]
                        self.add(Result(engine, line["ended"], status_, said, facts, line["took_s"], str(log)))
                seen = len(found)
                limit = self.start_timeout_s if at == "start" else self.timeout_s
                if status is not None and (status != 0 or at != "end"):
                    return at, f"the process ended with status {status}: {last_words(log)}", False
                if status is not None:
                    if "end" in wanted:
                        self.add(Result(engine, "end", "works", "", {}, time.monotonic() - since, str(log)))
                    return at, "", False
                if self.stopped:
                    return at, "stopped", False
                if time.monotonic() - since > limit:
                    return at, f"no result in {limit:g} s; last log message: {last_words(log)}", True
                time.sleep(BEAT_S)
        finally:
            _end(process)

    def command(self, words: Sequence[str], log: Path) -> str:
        """Runs a command to its end; returns why it failed, "" on success."""
        try:
            with log.open("wb") as output:
                done = subprocess.run(
                    words, stdout=output, stderr=subprocess.STDOUT, timeout=self.start_timeout_s, check=False
                )
        except subprocess.TimeoutExpired:
            return f"still running after {self.start_timeout_s:g} s; last log message: {last_words(log)}"
        return "" if done.returncode == 0 else f"exit status {done.returncode}: {last_words(log)}"

    # results

    def has(self, engine: str, check: str) -> bool:
        """Returns whether a check has a result."""
        return any((result.engine, result.check) == (engine, check) for result in self.results)

    def add(self, result: Result) -> None:
        """Stores a result and reports it as progress."""
        self.results.append(result)
        self.tell(f"{result.engine}: {result.check} {result.status}" + (f": {result.said}" if result.said else ""))

    def give_up(
        self,
        engine: str,
        checks: Sequence[str],
        status: Status,
        why: str,
        log: Path | None = None,
        others: Status | None = None,
    ) -> None:
        """Adds the same status and reason for several checks; `others`, if given, is the status after the first one."""
        for number, check in enumerate(checks):
            word = others if others and number else status
            self.add(Result(engine, check, word, why, {}, log="" if log is None else str(log)))


def _environment() -> dict[str, str]:
    """Returns the environment of a session's ranks, in which this package can be imported."""
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(Path(__file__).parents[1])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def check_names(what: str, asked: Sequence[str], known: Sequence[str] | Mapping[str, object]) -> None:
    """Raises UserError for an unknown name."""
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise UserError(f"unknown {what} '{unknown[0]}'; known: {', '.join(known)}.")


def last_words(log: Path) -> str:
    """Returns the last error line of a log, or else its last line; INFO lines of libraries are skipped."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if not line.startswith("INFO:")]
    told = [line for line in lines[-TAIL_LINES:] if "Error" in line or "error" in line]
    return (told or [line for line in lines if line] or ["nothing"])[-1][:MOST_CHARS]


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
