"""A checkpoint that is being made: the folder `NAME.partial`, its records, and who works on which part of it.

Owns the way from an empty disk to a finished folder. Everything is written in `NAME.partial`; its `.state` holds the
arguments of the work and one record for each part that is done; only a whole folder gets the name `NAME`. So whatever
is cut off, even by kill -9 or a full disk, leaves nothing that looks finished, and the same command continues it.

Any number of processes may work on one folder, on one host or several: each claims a part by a file lock, which the
system releases when a process dies. The records of processes that are gone are not trusted but checked
(`Claim.earlier`): the first process of a session, the one that finds no other alive, sets them aside.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from mrl.checkpoint.io.atomic_files import replace_file, sync_folder
from mrl.errors import UserError

MANIFEST = "manifest.json"

_STATE = ".state"
_SPENT = ".state.spent"
_ATTEMPTS = 10
_ARGUMENTS = "arguments.json"


@dataclass(frozen=True)
class Claim:
    """A part that this process works on.

    Attributes:
        earlier: What a process that is gone recorded of it; None: nothing.
    """

    earlier: dict[str, Any] | None


class PartialFolder:
    """The folder `NAME.partial` of the checkpoint `NAME`.

    Attributes:
        final: `NAME`.
        path: `NAME.partial`.
    """

    def __init__(self, final: str | Path) -> None:
        """Touches nothing yet."""
        self.final = Path(final)
        self.path = self.final.with_name(self.final.name + ".partial")
        self._state = self.path / _STATE

    def finished(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the folder has its name already, made with these arguments; one that lacks but the name gets it.

        Raises:
            UserError: Something else has that name, or the partial one.
        """
        if _holds_anything(self.path) and not self._state.is_dir():
            self._adopt(arguments)
        if not _holds_anything(self.final):
            return False
        if _read(self.final / MANIFEST).get("arguments") == _as_json(arguments):
            return True
        raise UserError(f"'{self.final}' exists and was not made by this command. Name a new folder, or remove it.")

    @contextmanager
    def session(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Joins the processes that work on the folder, or begins or continues it.

        Args:
            arguments: What the work depends on, as JSON; the folder is continued only with equal ones.

        Raises:
            UserError: It was begun with other arguments (the first difference is named), or cannot be written.
        """
        with self._join() as alive:
            first = _try_lock(alive)
            if not first:
                fcntl.flock(alive, fcntl.LOCK_SH)  # until the first process has set the records aside
            if self._is_current(alive):
                self._agree(arguments, first=first)
                if first:
                    with disk_errors(self.path):
                        self._set_aside()
            fcntl.flock(alive, fcntl.LOCK_SH)
            yield

    def discard(self) -> None:
        """Removes what a process that came too late has begun again; the folder has its name already."""
        shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def claim(self, part: str) -> Iterator[Claim | None]:
        """Claims a part for this process; None where it is done, or another process has it."""
        if self.record(part) is not None or not self._state.is_dir():
            yield None
            return
        try:
            lock = self._file("locks", part).open("a")
        except FileNotFoundError:  # another process has just finished the folder
            yield None
            return
        with lock:
            if not _try_lock(lock) or self.record(part) is not None:
                yield None
            else:
                yield Claim(_read(self._file("earlier", part)) or None)

    def record(self, part: str) -> dict[str, Any] | None:
        """What was recorded of a part in this session; None: it is not done."""
        return _read(self._file("records", part)) or None

    def add_record(self, part: str, record: Mapping[str, Any]) -> None:
        """Says that a claimed part is done; its files must be on the disk.

        Raises:
            UserError: The disk refuses.
        """
        with disk_errors(self.path):
            _write_json(self._file("records", part), record)

    def temporary(self, name: str) -> Path:
        """Where a claimed file is written before it is whole."""
        return self._state / f"{quote(name, safe='')}.{os.getpid()}.writing"

    def place(self, temporary: Path, name: str) -> None:
        """Gives a whole file its name in the folder."""
        with disk_errors(self.path):
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, target)
            sync_folder(target.parent)

    def names(self) -> list[str]:
        """The files of the folder so far, by their path in it."""
        paths = (path for path in self.path.rglob("*") if path.is_file() and self._state not in path.parents)
        return sorted(path.relative_to(self.path).as_posix() for path in paths if path != self.path / MANIFEST)

    @contextmanager
    def finishing(self) -> Iterator[bool]:
        """Whether this process is the one to finish the folder; the others have nothing left to do."""
        try:
            lock = (self._state / "finish").open("a")
        except FileNotFoundError:
            yield False
            return
        with lock:
            yield _try_lock(lock) and self._state.is_dir()

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Writes the manifest and gives the folder its name: the last step.

        Raises:
            UserError: The disk refuses.
        """
        with disk_errors(self.path):
            _write_json(self.path / MANIFEST, manifest)
            os.replace(self._state, self.path / _SPENT)
            self._rename()

    def _adopt(self, arguments: Mapping[str, Any]) -> None:
        """A folder without state: it was cut off before its last step, or is not ours."""
        if _read(self.path / MANIFEST).get("arguments") != _as_json(arguments):
            if not _holds_anything(self.path):  # another process has just moved it
                return
            raise UserError(
                f"'{self.path}' exists and is not the work of this command. Remove it, or name a new folder."
            )
        with disk_errors(self.path):
            self._rename()

    def _rename(self) -> None:
        try:
            sync_folder(self.path)
            os.replace(self.path, self.final)
        except FileNotFoundError:
            if not (self.final / MANIFEST).is_file():  # else another process has just done it
                raise
        sync_folder(self.final.parent)
        shutil.rmtree(self.final / _SPENT, ignore_errors=True)

    def _join(self) -> TextIO:
        """Opens the file whose lock says that a process is alive; makes the folders."""
        left = _ATTEMPTS
        while True:
            left -= 1
            with disk_errors(self.path):
                try:
                    for kind in ("records", "earlier", "locks"):
                        (self._state / kind).mkdir(parents=True, exist_ok=True)
                    return (self._state / "alive").open("a")
                except FileNotFoundError:  # another process has just finished the folder, and moved it
                    if not left:
                        raise

    def _is_current(self, alive: TextIO) -> bool:
        """Whether the folder is still the one that was joined: nobody has finished it meanwhile."""
        try:
            return (self._state / "alive").stat().st_ino == os.fstat(alive.fileno()).st_ino
        except FileNotFoundError:
            return False

    def _set_aside(self) -> None:
        for record in (self._state / "records").iterdir():
            os.replace(record, self._state / "earlier" / record.name)
        for remnant in self._state.rglob("*.writing"):
            remnant.unlink()

    def _agree(self, arguments: Mapping[str, Any], *, first: bool) -> None:
        path = self._state / _ARGUMENTS
        earlier, now = _read(path), _as_json(arguments)
        if first and not earlier:
            with disk_errors(self.path):
                _write_json(path, now)
        elif earlier and earlier != now:
            where, was, is_now = next(_differences(earlier, now))
            raise UserError(
                f"'{self.path}' was begun with other arguments: {where} was {was}, now it is {is_now}. Repeat the "
                "command that began it, or remove it to start again."
            )

    def _file(self, kind: str, part: str) -> Path:
        return self._state / kind / f"{quote(part, safe='')}.json"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns what the disk refuses into a UserError that names the folder and says what is kept."""
    try:
        yield
    except OSError as error:
        kept = " What is done is kept: make room and repeat the command." if error.errno == errno.ENOSPC else ""
        raise UserError(f"'{path}' cannot be written: {error.strerror or error}.{kept}") from error


def _holds_anything(path: Path) -> bool:
    """Whether there is a file, or a folder that is not empty."""
    try:
        return any(path.iterdir())
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return True


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())


def _as_json(content: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(content))
    return found


def _differences(before: Any, now: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif before != now:
        yield where, before, now
