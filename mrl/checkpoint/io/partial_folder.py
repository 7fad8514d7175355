"""A checkpoint folder that is written under the name `NAME.partial`, by several processes, and resumable.

Everything is written in `NAME.partial`. Its `.state` contains the arguments of the work and one record for each
finished part. Only a complete folder is renamed to `NAME`. So an interruption, even by kill -9 or a full disk, leaves
nothing that looks finished, and repeating the command continues the work.

Any number of processes may work on one folder, on one host or several. Each claims a part by a file lock, which the
system releases when the process dies. Records of processes that have ended are not trusted but verified
(`PartClaim.earlier_record`): the first process of a session, the one that finds no other alive, moves them aside.
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

import xxhash

from mrl.checkpoint.io.atomic_files import replace_file, sync_folder
from mrl.errors import UserError

MANIFEST = "manifest.json"

_STATE = ".state"
_FINISHED_STATE = ".state.spent"
_ATTEMPTS = 10
_MAX_NAME_LENGTH = 200
"""Longest name of a record, characters; a file system allows 255, and a temporary file's name is longer."""
_ARGUMENTS = "arguments.json"


@dataclass(frozen=True)
class PartClaim:
    """A part that this process works on.

    Attributes:
        earlier_record: Record of the part from an earlier session; None: no record.
    """

    earlier_record: dict[str, Any] | None


class PartialFolder:
    """The folder `NAME.partial` of the checkpoint `NAME`.

    Attributes:
        final: Path `NAME`.
        path: Path `NAME.partial`.
    """

    def __init__(self, final: str | Path) -> None:
        """Sets the paths; does not touch the disk."""
        self.final = Path(final)
        self.path = self.final.with_name(self.final.name + ".partial")
        self._state = self.path / _STATE

    def is_finished(self, arguments: Mapping[str, Any]) -> bool:
        """Returns whether the final folder exists; first completes a rename that an earlier process did not finish.

        Args:
            arguments: Arguments of the command that writes the folder.

        Raises:
            UserError: The final folder was made with other arguments, or a path exists that this class did not create.
        """
        if _is_occupied(self.path) and not self._state.is_dir():
            self._complete_rename(arguments)
        if not _is_occupied(self.final):
            return False
        if _read(self.final / MANIFEST).get("arguments") == _as_json(arguments):
            return True
        raise UserError(f"'{self.final}' exists and was not made by this command. Choose a new folder, or remove it.")

    @contextmanager
    def session(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Joins the processes that work on the folder; starts or continues it if there are none.

        Args:
            arguments: Everything the work depends on, serializable as JSON; the folder continues only with equal ones.

        Raises:
            UserError: It was started with other arguments (names the first difference), or cannot be written.
        """
        with self._open_alive_file() as alive:
            first = _try_lock(alive)
            if not first:
                fcntl.flock(alive, fcntl.LOCK_SH)  # waits until the first process has moved the records aside
            if self._is_current(alive):
                self._check_arguments(arguments, first=first)
                if first:
                    with disk_errors(self.path):
                        self._move_records_aside()
            fcntl.flock(alive, fcntl.LOCK_SH)
            yield

    def discard(self) -> None:
        """Removes the partial folder of a process that came too late: the final folder exists already."""
        shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def claim(self, part: str) -> Iterator[PartClaim | None]:
        """Claims a part for this process; yields None if it is finished or claimed by another process."""
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
                yield PartClaim(_read(self._file("earlier", part)) or None)

    def record(self, part: str) -> dict[str, Any] | None:
        """Returns the record of a part finished in this session; None if it is not finished."""
        return _read(self._file("records", part)) or None

    def add_record(self, part: str, record: Mapping[str, Any]) -> None:
        """Records that a claimed part is finished; its files must be fsynced.

        Raises:
            UserError: The disk refuses.
        """
        with disk_errors(self.path):
            _write_json(self._file("records", part), record)

    def temporary(self, name: str) -> Path:
        """Returns the path where a claimed file is written until it is complete."""
        return self._state / f"{quote(name, safe='')}.{os.getpid()}.writing"

    def publish(self, temporary: Path, name: str) -> None:
        """Renames a complete file to its name in the folder."""
        with disk_errors(self.path):
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, target)
            sync_folder(target.parent)

    def names(self) -> list[str]:
        """Returns the paths, relative to the folder, of its current files."""
        paths = (path for path in self.path.rglob("*") if path.is_file() and self._state not in path.parents)
        return sorted(path.relative_to(self.path).as_posix() for path in paths if path != self.path / MANIFEST)

    @contextmanager
    def finishing(self) -> Iterator[bool]:
        """Yields whether this process is the one that finishes the folder; others have nothing left to do."""
        try:
            lock = (self._state / "finish").open("a")
        except FileNotFoundError:
            yield False
            return
        with lock:
            yield _try_lock(lock) and self._state.is_dir()

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Writes the manifest and renames the folder: the last step.

        Raises:
            UserError: The disk refuses.
        """
        with disk_errors(self.path):
            _write_json(self.path / MANIFEST, manifest)
            os.replace(self._state, self.path / _FINISHED_STATE)
            self._rename()

    def _complete_rename(self, arguments: Mapping[str, Any]) -> None:
        """Handles a folder without state: renames it if only that step was missing, refuses it if it is not ours."""
        if _read(self.path / MANIFEST).get("arguments") != _as_json(arguments):
            if not _is_occupied(self.path):  # another process has just moved it
                return
            raise UserError(
                f"'{self.path}' exists and was not made by this command. Remove it, or choose a new folder."
            )
        with disk_errors(self.path):
            self._rename()

    def _rename(self) -> None:
        try:
            sync_folder(self.path)
            os.replace(self.path, self.final)
        except FileNotFoundError:
            if not (self.final / MANIFEST).is_file():  # otherwise another process has just renamed it
                raise
        sync_folder(self.final.parent)
        shutil.rmtree(self.final / _FINISHED_STATE, ignore_errors=True)

    def _open_alive_file(self) -> TextIO:
        """Creates the folders and opens the file whose lock shows that a process is alive."""
        attempts_left = _ATTEMPTS
        while True:
            attempts_left -= 1
            with disk_errors(self.path):
                try:
                    for kind in ("records", "earlier", "locks"):
                        (self._state / kind).mkdir(parents=True, exist_ok=True)
                    return (self._state / "alive").open("a")
                except FileNotFoundError:  # another process has just finished the folder, and moved it
                    if not attempts_left:
                        raise

    def _is_current(self, alive: TextIO) -> bool:
        """Returns whether the joined folder still exists, i.e. no other process has finished it meanwhile."""
        try:
            return (self._state / "alive").stat().st_ino == os.fstat(alive.fileno()).st_ino
        except FileNotFoundError:
            return False

    def _move_records_aside(self) -> None:
        for record in (self._state / "records").iterdir():
            os.replace(record, self._state / "earlier" / record.name)
        for remnant in self._state.rglob("*.writing"):
            remnant.unlink()

    def _check_arguments(self, arguments: Mapping[str, Any], *, first: bool) -> None:
        path = self._state / _ARGUMENTS
        earlier, now = _read(path), _as_json(arguments)
        if first and not earlier:
            with disk_errors(self.path):
                _write_json(path, now)
        elif earlier and earlier != now:
            where, was, is_now = next(_differences(earlier, now))
            raise UserError(
                f"'{self.path}' was started with other arguments: {where} was {was}, now it is {is_now}. Repeat the "
                "original command, or remove the folder to start again."
            )

    def _file(self, kind: str, part: str) -> Path:
        name = quote(part, safe="")
        if len(name) > _MAX_NAME_LENGTH:  # a path in another folder
            name = name[: _MAX_NAME_LENGTH // 2] + xxhash.xxh3_128_hexdigest(part.encode())
        return self._state / kind / f"{name}.json"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns an OSError into a UserError that names the folder and, on a full disk, how to continue."""
    try:
        yield
    except OSError as error:
        kept = " Finished parts are kept: free space and repeat the command." if error.errno == errno.ENOSPC else ""
        raise UserError(f"'{path}' cannot be written: {error.strerror or error}.{kept}") from error


def _is_occupied(path: Path) -> bool:
    """Returns whether the path is a file or a folder that is not empty."""
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
    """Reads a JSON object; {} if there is none."""
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
