"""TensorBoard event files in the run folder: all metrics, and samples as text.

Warm start and RL count their own steps, so each is a separate TensorBoard run (tensorboard/warm_start,
tensorboard/train). On resume `purge_step` hides events after the resumed step.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.checkpoint.io.atomic_files import append
from mrl.config.config import Config
from mrl.errors import UserError
from mrl.observability.loggers.base import Logger, Opening, Phase, is_installed

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event


class TensorBoard(Logger):
    """Logger enabled by `observe.tensorboard`."""

    def __init__(self, opening: Opening) -> None:
        """Stores the arguments; event files are created with the first value."""
        self._opening = opening
        self._files: dict[str, EventFile] = {}

    def record(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one scalar per metric, all in one event because each event costs a checksum in Python."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._file(phase).add(step, [Summary(value=values)])

    def samples(self, phase: Phase, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds prompt, response and reward as indented text, which Markdown renders literally."""
        from torch.utils.tensorboard.summary import text

        blocks = [f"reward {row['reward']}\n{row['prompt']}{row['response']}" for row in rows]
        words = "\n\n---\n\n".join("\n".join(f"    {line}" for line in block.splitlines()) for block in blocks)
        self._file(phase).add(step, [text(f"samples/{phase}", words)])  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Closes the event files."""
        for file in self._files.values():
            file.close()

    def _file(self, phase: Phase) -> EventFile:
        name = "warm_start" if phase == "warm_start" else "train"
        if name not in self._files:
            resumed = self._opening.resume_step
            folder = self._opening.run.tensorboard / name
            self._files[name] = EventFile(folder, purge_step=0 if resumed is None else resumed + 1)
        return self._files[name]


class EventFile:
    """Event file without a thread: the thread of torch's SummaryWriter prints a traceback when the disk is full."""

    def __init__(self, folder: Path, purge_step: int) -> None:
        """Creates a new file in a folder; events of older files from step `purge_step` on are hidden."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(
                f"'{error.filename}' cannot be created: a file is in the place of TensorBoard's folder. Move the "
                "file away, or set observe.tensorboard=false."
            ) from error
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._path = next(path for count in itertools.count() if not (path := folder / f"{name}.{count}").exists())
        self._stream = self._path.open("xb", buffering=0)
        self._write(
            Event(wall_time=time.time(), step=purge_step, file_version="brain.Event:2"),
            Event(wall_time=time.time(), step=purge_step, session_log=SessionLog(status=SessionLog.START)),
        )

    def add(self, step: int, summaries: Sequence[Any]) -> None:
        """Writes one event for each summary protobuf.

        Raises:
            OSError: The disk is full or not writable; the message names the file.
        """
        from tensorboard.compat.proto.event_pb2 import Event

        self._write(*(Event(wall_time=time.time(), step=step, summary=summary) for summary in summaries))

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()

    def _write(self, *events: Event) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        content = io.BytesIO()
        for event in events:
            RecordWriter(content).write(event.SerializeToString())
        append(self._stream.fileno(), content.getvalue(), self._path)


def check(config: Config) -> None:
    """Raises UserError if TensorBoard is enabled and its package is not installed."""
    if config.observe.tensorboard and not is_installed("tensorboard"):
        raise UserError(
            "observe.tensorboard is true, but the package 'tensorboard' is not installed. "
            "Run `pip install tensorboard`, or set observe.tensorboard=false."
        )


def open_tensorboard(opening: Opening) -> TensorBoard | None:
    """Returns the logger if `observe.tensorboard` is set, else None."""
    if not opening.config.observe.tensorboard:
        return None
    check(opening.config)
    return TensorBoard(opening)


LOGGER = open_tensorboard
