"""The run folder's own logs: metrics.jsonl, timings.jsonl, samples.jsonl and notes.jsonl. They are always written.

metrics.jsonl contains only metrics that are equal in two identical runs. Metrics that depend on the clock or the
machine (`metrics.is_wall_clock`) go to timings.jsonl under the same step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.checkpoint.io.atomic_files import append
from mrl.checkpoint.io.jsonl_log import Row, StepFile, encode, read_rows, truncate_rows
from mrl.observability.loggers.base import Logger, Opening, Phase
from mrl.observability.metrics import is_wall_clock


class Files(Logger):
    """Logger that writes the JSON lines files of a run folder."""

    def __init__(self, opening: Opening) -> None:
        """Opens the files and deletes lines after the resumed step."""
        run, resume_step = opening.run, opening.resume_step

        def keep(row: Row) -> bool:
            return resume_step is not None and (row["phase"] == "warm_start" or row["step"] <= resume_step)

        for path in (run.metrics, run.timings, run.samples):
            truncate_rows(path, keep)
        truncate_rows(run.notes, lambda row: True, by_step=False)
        self._run = run
        self._metrics = StepFile(run.metrics)
        self._timings = StepFile(run.timings)
        self._written = {(row["phase"], row["step"]) for row in read_rows(run.samples)}
        self._samples = os.open(run.samples, os.O_WRONLY | os.O_CREAT, 0o644)
        self._notes = os.open(run.notes, os.O_WRONLY | os.O_CREAT, 0o644)

    def record(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the metrics of a step; evaluations join the line of their step."""
        phase = "train" if phase == "val" else phase
        steady = {name: value for name, value in metrics.items() if not is_wall_clock(name)}
        if steady:
            self._metrics.put(phase, step, steady)
        if len(steady) < len(metrics):
            self._timings.put(phase, step, {name: metrics[name] for name in metrics if name not in steady})

    def warm_start_resumed(self, step: int) -> None:
        """Deletes the lines of later warm-start steps."""
        self._metrics.close()
        self._timings.close()
        for path in (self._run.metrics, self._run.timings):
            truncate_rows(path, lambda row: row["phase"] == "warm_start" and row["step"] <= step)
        self._metrics, self._timings = StepFile(self._run.metrics), StepFile(self._run.timings)

    def samples(self, phase: Phase, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends one line per sample; skips a step that already has samples (a resumed run evaluates again)."""
        if (phase, step) not in self._written:
            content = b"".join(encode({"step": step, "phase": phase, **row}) for row in rows)
            append(self._samples, content, self._run.samples)

    def note(self, text: str) -> None:
        """Appends the message with the time of day."""
        row = encode({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "text": text})
        append(self._notes, row, self._run.notes)

    def sync(self) -> None:
        """Flushes to disk, so that a checkpoint never outlives the metrics of its steps."""
        self._metrics.sync()
        self._timings.sync()
        os.fsync(self._samples)

    def close(self) -> None:
        """Closes the files."""
        self._metrics.close()
        self._timings.close()
        os.close(self._samples)
        os.close(self._notes)


LOGGER = Files
