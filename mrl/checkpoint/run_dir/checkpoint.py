"""Commit points: a checkpoint is whole or it is not there.

Owns the run folder's `checkpoints/`: one folder `step-<n>` per commit, written under a temporary name with the hash of
every file and moved into place last, so that a kill at any moment leaves the last whole one. It does not know what is
inside: the caller's `write` puts the Megatron checkpoint (and whatever else) there. The record is `manifest.py`'s.

    checkpoints/step-00000010/   commit.json (files, bytes, sha256)   state.json (the loop's state)   actor/ ...
    checkpoints/.writing-*       not whole yet, or left by a kill; .replaced-*, .removed-*: on their way out
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mrl.checkpoint.io.atomic_files import sync_folder, write_file
from mrl.checkpoint.run_dir.manifest import (
    RECORD,
    STATE,
    Commit,
    DamagedError,
    File,
    check_files,
    committed_steps,
    folder_name,
    has_record,
    read_commit,
    read_object,
    step_of,
)
from mrl.config.config import CheckpointConfig
from mrl.distributed.collectives import from_first_rank, together
from mrl.errors import UserError

LEFTOVERS = (".writing-*", ".replaced-*", ".removed-*")
"""Names of folders that are no commits: what a kill left of a save."""


@dataclass(frozen=True)
class Found:
    """The commit that a run goes on from; every file of it was compared with its hash.

    Attributes:
        state: The loop's, as it was saved.
        notes: A line for each newer one that is damaged.
        compared_s: What the comparison took.
    """

    step: int
    state: dict[str, Any]
    notes: list[str]
    compared_s: float


class Writing(Protocol):
    """What a commit's `write` has left to be written, while the job goes on."""

    @property
    def is_done(self) -> bool:
        """Whether this rank's part is written, or cannot be."""

    def finish(self) -> dict[Path, File]:
        """Collective over the job: waits for it, raises what went wrong, and gives the hashes that are known."""


@dataclass(frozen=True)
class Unfinished:
    """A commit that is not there yet.

    Attributes:
        metric: `checkpoint.best_metric` when it was begun.
        temporary: The folder in which it grows.
        writing: What is left of it; None: nothing.
    """

    step: int
    metric: float | None
    temporary: Path
    writing: Writing | None


class Checkpoints:
    """The commits of one run; every rank holds one and calls each method together.

    Attributes:
        tell: Hears on rank 0 what could not be removed.

    Args:
        folder: `checkpoints/` of the run folder.
        config: What stays.
        tell: See above.
        check: Called on rank 0 before a commit is begun, and before it is put in its place: raises where another job
            has taken the run folder.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        tell: Callable[[str], None] = lambda text: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.config = config
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.tell = tell
        self._check = check
        self._told: set[Path] = set()

    def steps(self) -> list[int]:
        """Steps with a whole commit, ascending."""
        return committed_steps(self.folder)

    def path(self, step: int) -> Path:
        """Folder of a step's commit."""
        return self.folder / folder_name(step)

    def save(
        self, step: int, write: Callable[[Path], Writing | None], state: dict[str, Any], metric: float | None = None
    ) -> Path:
        """Collective over the job: `begin` and `finish`."""
        return self.finish(self.begin(step, write, state, metric))

    def begin(
        self, step: int, write: Callable[[Path], Writing | None], state: dict[str, Any], metric: float | None = None
    ) -> Unfinished:
        """Collective over the job: what `write` puts into the folder it is given, and `state` beside it, is on its way.

        Args:
            step: Names the commit.
            write: Collective over the job; called with an empty folder. It may leave some to be written later.
            state: JSON-able.
            metric: Value of `checkpoint.best_metric` now, for `keep_best`; None: unknown.

        Raises:
            UserError: The disk is full or not writable; the commits that were there stay.
        """
        temporary = self.folder / from_first_rank(_aside("writing", step))
        writing: Writing | None = None
        with self._undone(temporary):
            with self._saving():
                if self.rank == 0:
                    self._check()
                    temporary.mkdir()
            with self._saving():
                writing = write(temporary)
            with self._saving():
                if self.rank == 0:
                    write_file(temporary / STATE, json.dumps(state, indent=1).encode())
        return Unfinished(step, metric, temporary, writing)

    def is_written(self, unfinished: Unfinished) -> bool:
        """Collective over the job: whether `finish` has nothing to wait for on any rank."""
        missing = torch.tensor(int(unfinished.writing is not None and not unfinished.writing.is_done))
        dist.all_reduce(missing)
        return not missing

    def finish(self, unfinished: Unfinished) -> Path:
        """Collective over the job: waits until all is written and commits it.

        Raises:
            UserError: As for `begin`.
        """
        temporary, final = unfinished.temporary, self.path(unfinished.step)
        with self._undone(temporary):
            written: dict[Path, File] = {}
            with self._saving():
                if unfinished.writing is not None:
                    written = unfinished.writing.finish()
            files = self._joined({path.relative_to(temporary).as_posix(): facts for path, facts in written.items()})
            with self._saving():
                mine = self._hashed(temporary, [name for name in _names(temporary) if name not in files])
            files |= self._joined(mine)
            with self._saving():
                if self.rank == 0:
                    self._finish(temporary, final, Commit(unfinished.step, unfinished.metric, files))
        with self._saving():
            if self.rank == 0:
                self._prune()
        return final

    @contextmanager
    def _undone(self, temporary: Path) -> Iterator[None]:
        """Collective over the job: a folder whose commit fails inside goes: it may be what has filled the disk."""
        try:
            yield
        except UserError:
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def newest(self, *, mends: bool) -> Found | None:
        """Collective over the job: the newest whole commit; newer ones that are damaged are named in its notes.

        Args:
            mends: What a kill left is put right first: only for who owns the run folder.

        Raises:
            UserError: There are commits, and not one is whole; or one cannot be read, or is of another version.
        """
        candidates: list[Path] = []
        with together():
            if self.rank == 0:
                if mends:
                    self._mend()
                found = [(step, path) for path in self.folder.glob("step-*") if (step := step_of(path)) is not None]
                candidates = [path for _, path in sorted(found, reverse=True) if has_record(path)]
        candidates = from_first_rank(candidates)
        damaged: list[DamagedError] = []
        for path in candidates:
            began = time.monotonic()
            try:
                state = self.read(path)
            except DamagedError as error:
                damaged.append(error)
                continue
            notes = [f"{error.path} is damaged: {error.what}; the run goes on from {path.name}" for error in damaged]
            return Found(step_of(path) or 0, state, notes, time.monotonic() - began)
        if damaged:
            raise UserError(
                f"'{self.folder}' has no whole checkpoint: {'; '.join(f'{e.path.name}: {e.what}' for e in damaged)}. "
                f"Bring back what is missing, or remove {'it' if len(damaged) == 1 else 'them'} to start from nothing."
            )
        return None

    def read(self, path: Path) -> dict[str, Any]:
        """Collective over the job: the state of a commit, after every file of it was compared with its hash.

        Raises:
            DamagedError: The record is none, or a file is missing or differs.
            UserError: The folder is no commit, one of another version, or cannot be read.
        """
        record: Commit | None = None
        with self._damage():
            if self.rank == 0:
                record = read_commit(path)
                check_files(path, record)
        commit: Commit = from_first_rank(record)
        with self._damage():
            for name, facts in self._hashed(path, sorted(commit.files)).items():
                if facts != commit.files[name]:
                    raise DamagedError(path, f"'{name}' has changed since it was written")
        with self._damage():
            return read_object(path, STATE)

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Collective over the job: as `together`, and a DamagedError of one rank is one on all."""
        damage: DamagedError | None = None
        with together():
            try:
                yield
            except DamagedError as error:
                damage = error
            except OSError as error:
                raise UserError(f"a checkpoint cannot be read: {error}. Mend that, and start again.") from error
        found: list[DamagedError | None] = [None] * self.world_size
        dist.all_gather_object(found, damage)
        for each in found:
            if each is not None:
                raise each

    def _hashed(self, folder: Path, names: list[str]) -> dict[str, File]:
        """This rank's share of the files, as they are."""
        return {name: hash_file(folder / name) for name in names[self.rank :: self.world_size]}

    def _joined(self, mine: dict[str, File]) -> dict[str, File]:
        """Collective over the job: the shares of all ranks."""
        parts: list[dict[str, File]] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(parts, mine)
        return {name: facts for part in parts for name, facts in part.items()}

    def _finish(self, temporary: Path, final: Path, commit: Commit) -> None:
        """Makes the commit whole, and puts it in its place; what was there goes aside first, and back after a kill."""
        write_file(temporary / RECORD, commit.encode())
        for folder in {temporary, *(path for path in temporary.rglob("*") if path.is_dir())}:
            sync_folder(folder)
        self._check()
        if final.exists():
            final.rename(self.folder / _aside("replaced", commit.step))
        temporary.rename(final)
        sync_folder(self.folder)

    def _mend(self) -> None:
        """Puts back what a kill left aside, and removes what it left half written or half removed."""
        aside = [path for path in self.folder.glob(".replaced-*") if (path / RECORD).is_file()]
        for path in sorted(aside, key=lambda path: (path / RECORD).stat().st_mtime_ns):
            final = self.folder / f"step-{path.name.split('-')[1]}"
            if step_of(final) is not None and not final.exists():
                path.rename(final)
        self._remove_leftovers()

    def _prune(self) -> None:
        """Takes away what neither `keep_last` nor `keep_best` keeps, and what a killed save left.

        What cannot be removed is told, and tried again at the next commit.
        """
        steps = self.steps()
        keep = set(steps[-self.config.keep_last :])
        if self.config.keep_best:
            metrics = {step: read_commit(self.path(step)).metric for step in steps}
            ranked = [(metric, step) for step, metric in metrics.items() if metric is not None]
            keep |= {step for _, step in sorted(ranked, reverse=True)[: self.config.keep_best]}
        for step in sorted(set(steps) - keep):
            with self._told_if_kept(self.path(step)):
                self.path(step).rename(self.folder / _aside("removed", step))  # half removed it must not look whole
        sync_folder(self.folder)
        self._remove_leftovers()

    def discard(self, path: Path) -> None:
        """Removes a folder that is no commit; what cannot be removed is told."""
        with self._told_if_kept(path):
            remove_folder(path)

    def _remove_leftovers(self) -> None:
        for leftover in (path for pattern in LEFTOVERS for path in self.folder.glob(pattern)):
            self.discard(leftover)

    @contextmanager
    def _told_if_kept(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if path not in self._told:
                self.tell(f"'{path}' cannot be removed ({error.strerror}): it stays, and takes space")
            self._told.add(path)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Collective over the job: what fails inside on any rank is raised on all."""
        with together():
            try:
                yield
            except OSError as error:
                raise UserError(
                    f"checkpoint in '{self.folder}' failed: {error}. Free space or make the folder writable, then "
                    "start the same command again: it continues from the last complete checkpoint."
                ) from error


def remove_folder(folder: Path) -> None:
    """Removes as much of a folder as can be removed.

    Raises:
        OSError: Something of it is still there; why that was so first.
    """
    try:
        shutil.rmtree(folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            raise


def _aside(why: str, step: int) -> str:
    """A name that no other commit, and no earlier life of the run, has used."""
    return f".{why}-{step:08d}-{secrets.token_hex(4)}"


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def hash_file(path: Path) -> File:
    """Size and hash of a file, which is on the disk when this returns."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256") if hasattr(hashlib, "file_digest") else _digest(stream)
        os.fsync(stream.fileno())
        return File(os.fstat(stream.fileno()).st_size, digest.hexdigest())


def _digest(stream: Iterable[bytes]) -> Any:
    digest = hashlib.sha256()  # Python 3.10 has no file_digest
    for block in stream:
        digest.update(block)
    return digest
