"""Checkpoints of a run, written atomically: after a kill at any moment, the last complete checkpoint remains.

Each checkpoint is a folder `step-<n>` in `checkpoints/`. It is written under a temporary name with the hash of every
file and renamed last. The caller's `write` produces the content: the Megatron checkpoint and everything else. The
manifest is defined in `manifest.py`.

    checkpoints/step-00000010/   commit.json (files, bytes, sha256)   state.json (the loop's state)   actor/ ...
    checkpoints/.writing-*       being written, or left by a kill; .replaced-*, .removed-*: being removed
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
    MANIFEST_FILE,
    STATE_FILE,
    DamagedCheckpointError,
    FileRecord,
    Manifest,
    check_files,
    committed_steps,
    folder_name,
    has_manifest,
    read_json_object,
    read_manifest,
    step_of,
)
from mrl.config.config import CheckpointConfig
from mrl.distributed.collectives import broadcast_from_rank_0, raise_on_all_ranks
from mrl.errors import UserError

LEFTOVERS = (".writing-*", ".replaced-*", ".removed-*")
"""Patterns of folders that an interrupted save may leave; none of them is a checkpoint."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a run resumes; the hash of every file was verified.

    Attributes:
        step: Number of completed steps.
        state: State of the training loop, as saved.
        notes: One line for each newer checkpoint that is damaged.
        compared_s: Time that the verification took, seconds.
    """

    step: int
    state: dict[str, Any]
    notes: list[str]
    compared_s: float


class AsyncWrite(Protocol):
    """Asynchronous part of a checkpoint's `write`, which runs while the job continues."""

    @property
    def is_done(self) -> bool:
        """True if this rank's part is written or has failed."""

    def finish(self) -> dict[Path, FileRecord]:
        """Collective over the job: waits for the writes, raises their errors, and returns the known hashes."""


@dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint that is being written.

    Attributes:
        step: Number of completed steps.
        metric: Value of `checkpoint.best_metric` at that step; None: unknown.
        temporary: Folder that is renamed at the end.
        writing: Remaining asynchronous writes; None: none.
    """

    step: int
    metric: float | None
    temporary: Path
    writing: AsyncWrite | None


class CheckpointManager:
    """The checkpoints of one run; every rank has one object and all call each method together.

    Attributes:
        log: Called on rank 0 with a message about each folder that could not be removed.

    Args:
        folder: `checkpoints/` of the run folder.
        config: Retention of checkpoints: `keep_last`, `keep_best`.
        log: Called on rank 0 with a message about each folder that could not be removed.
        check: Called on rank 0 before a checkpoint is started and before it is renamed; raises if another job has taken
            the run folder.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        log: Callable[[str], None] = lambda text: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.config = config
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.log = log
        self._check = check
        self._reported: set[Path] = set()

    def steps(self) -> list[int]:
        """Returns the steps with a complete checkpoint, ascending."""
        return committed_steps(self.folder)

    def path(self, step: int) -> Path:
        """Returns the folder of a step's checkpoint."""
        return self.folder / folder_name(step)

    def save(
        self, step: int, write: Callable[[Path], AsyncWrite | None], state: dict[str, Any], metric: float | None = None
    ) -> Path:
        """Collective over the job: writes a checkpoint synchronously (`begin_save`, then `finish_save`)."""
        return self.finish_save(self.begin_save(step, write, state, metric))

    def begin_save(
        self, step: int, write: Callable[[Path], AsyncWrite | None], state: dict[str, Any], metric: float | None = None
    ) -> PendingCheckpoint:
        """Collective over the job: starts a checkpoint with the files that `write` produces, and `state`.

        Args:
            step: Number of completed steps; names the folder.
            write: Collective over the job; called with an empty folder. Returns writes that remain, or None.
            state: State of the training loop, serializable as JSON.
            metric: Current value of `checkpoint.best_metric`, for `keep_best`; None: unknown.

        Raises:
            UserError: The disk is full or not writable; earlier checkpoints remain.
        """
        temporary = self.folder / broadcast_from_rank_0(_hidden_name("writing", step))
        writing: AsyncWrite | None = None
        with self._removed_on_failure(temporary):
            with self._save_errors():
                if self.rank == 0:
                    self._check()
                    temporary.mkdir()
            with self._save_errors():
                writing = write(temporary)
            with self._save_errors():
                if self.rank == 0:
                    write_file(temporary / STATE_FILE, json.dumps(state, indent=1).encode())
        return PendingCheckpoint(step, metric, temporary, writing)

    def is_written(self, pending: PendingCheckpoint) -> bool:
        """Returns whether all ranks have written their parts, so that `finish_save` does not wait; collective."""
        missing = torch.tensor(int(pending.writing is not None and not pending.writing.is_done))
        dist.all_reduce(missing)
        return not missing

    def finish_save(self, unfinished: PendingCheckpoint) -> Path:
        """Collective over the job: waits until everything is written, then commits the checkpoint.

        Raises:
            UserError: The disk is full or not writable; earlier checkpoints remain.
        """
        temporary, final = unfinished.temporary, self.path(unfinished.step)
        with self._removed_on_failure(temporary):
            written: dict[Path, FileRecord] = {}
            with self._save_errors():
                if unfinished.writing is not None:
                    written = unfinished.writing.finish()
            files = self._gather({path.relative_to(temporary).as_posix(): facts for path, facts in written.items()})
            with self._save_errors():
                mine = self._hash_share(temporary, [name for name in _file_names(temporary) if name not in files])
            files |= self._gather(mine)
            with self._save_errors():
                if self.rank == 0:
                    self._commit(temporary, final, Manifest(unfinished.step, unfinished.metric, files))
        with self._save_errors():
            if self.rank == 0:
                self._prune()
        return final

    @contextmanager
    def _removed_on_failure(self, temporary: Path) -> Iterator[None]:
        """Collective over the job: removes the folder if its checkpoint fails; it may be what filled the disk."""
        try:
            yield
        except UserError:
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def find_latest(self, *, repair: bool) -> ResumePoint | None:
        """Collective over the job: returns the newest intact checkpoint; its notes name newer ones that are damaged.

        Args:
            repair: Repair what a kill left first; only for the job that has the run lock.

        Raises:
            UserError: All checkpoints are damaged, or one cannot be read or has another version.
        """
        candidates: list[Path] = []
        with raise_on_all_ranks():
            if self.rank == 0:
                if repair:
                    self._repair()
                found = [(step, path) for path in self.folder.glob("step-*") if (step := step_of(path)) is not None]
                candidates = [path for _, path in sorted(found, reverse=True) if has_manifest(path)]
        candidates = broadcast_from_rank_0(candidates)
        damaged: list[DamagedCheckpointError] = []
        for path in candidates:
            began = time.monotonic()
            try:
                state = self.read(path)
            except DamagedCheckpointError as error:
                damaged.append(error)
                continue
            notes = [f"{error.path} is damaged: {error.what}; the run resumes from {path.name}" for error in damaged]
            return ResumePoint(step_of(path) or 0, state, notes, time.monotonic() - began)
        if damaged:
            raise UserError(
                f"'{self.folder}' has no intact checkpoint: {'; '.join(f'{e.path.name}: {e.what}' for e in damaged)}. "
                f"Restore the files, or remove {'it' if len(damaged) == 1 else 'them'} to start from the beginning."
            )
        return None

    def read(self, path: Path) -> dict[str, Any]:
        """Collective over the job: verifies every file of a checkpoint and returns its state.

        Raises:
            DamagedCheckpointError: The manifest is invalid, or a file is missing or differs.
            UserError: The folder is not a checkpoint, has another version, or cannot be read.
        """
        record: Manifest | None = None
        with self._damage_errors():
            if self.rank == 0:
                record = read_manifest(path)
                check_files(path, record)
        commit: Manifest = broadcast_from_rank_0(record)
        with self._damage_errors():
            for name, facts in self._hash_share(path, sorted(commit.files)).items():
                if facts != commit.files[name]:
                    raise DamagedCheckpointError(path, f"'{name}' has changed since it was written")
        with self._damage_errors():
            return read_json_object(path, STATE_FILE)

    @contextmanager
    def _damage_errors(self) -> Iterator[None]:
        """Collective over the job: like `raise_on_all_ranks`, but keeps a rank's DamagedCheckpointError as such."""
        damage: DamagedCheckpointError | None = None
        with raise_on_all_ranks():
            try:
                yield
            except DamagedCheckpointError as error:
                damage = error
            except OSError as error:
                raise UserError(f"a checkpoint cannot be read: {error}. Fix that and start again.") from error
        found: list[DamagedCheckpointError | None] = [None] * self.world_size
        dist.all_gather_object(found, damage)
        for each in found:
            if each is not None:
                raise each

    def _hash_share(self, folder: Path, names: list[str]) -> dict[str, FileRecord]:
        """Hashes this rank's share of the files."""
        return {name: sha256_file(folder / name) for name in names[self.rank :: self.world_size]}

    def _gather(self, mine: dict[str, FileRecord]) -> dict[str, FileRecord]:
        """Collective over the job: merges the dicts of all ranks."""
        parts: list[dict[str, FileRecord]] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(parts, mine)
        return {name: facts for part in parts for name, facts in part.items()}

    def _commit(self, temporary: Path, final: Path, manifest: Manifest) -> None:
        """Writes the manifest and renames the folder; an existing one is renamed aside, and restored after a kill."""
        write_file(temporary / MANIFEST_FILE, manifest.encode())
        for folder in {temporary, *(path for path in temporary.rglob("*") if path.is_dir())}:
            sync_folder(folder)
        self._check()
        if final.exists():
            final.rename(self.folder / _hidden_name("replaced", manifest.step))
        temporary.rename(final)
        sync_folder(self.folder)

    def _repair(self) -> None:
        """Restores folders that a kill left aside, and removes partially written or removed ones."""
        aside = [path for path in self.folder.glob(".replaced-*") if (path / MANIFEST_FILE).is_file()]
        for path in sorted(aside, key=lambda path: (path / MANIFEST_FILE).stat().st_mtime_ns):
            final = self.folder / f"step-{path.name.split('-')[1]}"
            if step_of(final) is not None and not final.exists():
                path.rename(final)
        self._remove_leftovers()

    def _prune(self) -> None:
        """Removes checkpoints that neither `keep_last` nor `keep_best` keeps, and leftovers of interrupted saves.

        Folders that cannot be removed are reported, and tried again at the next checkpoint.
        """
        steps = self.steps()
        keep = set(steps[-self.config.keep_last :])
        if self.config.keep_best:
            metrics = {step: read_manifest(self.path(step)).metric for step in steps}
            ranked = [(metric, step) for step, metric in metrics.items() if metric is not None]
            keep |= {step for _, step in sorted(ranked, reverse=True)[: self.config.keep_best]}
        for step in sorted(set(steps) - keep):
            with self._report_if_not_removed(self.path(step)):
                self.path(step).rename(
                    self.folder / _hidden_name("removed", step)
                )  # must not look complete while removed
        sync_folder(self.folder)
        self._remove_leftovers()

    def discard(self, path: Path) -> None:
        """Removes a folder that is not a checkpoint; reports it if it cannot be removed."""
        with self._report_if_not_removed(path):
            remove_folder(path)

    def _remove_leftovers(self) -> None:
        for leftover in (path for pattern in LEFTOVERS for path in self.folder.glob(pattern)):
            self.discard(leftover)

    @contextmanager
    def _report_if_not_removed(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if path not in self._reported:
                self.log(f"'{path}' cannot be removed ({error.strerror}) and still takes space")
            self._reported.add(path)

    @contextmanager
    def _save_errors(self) -> Iterator[None]:
        """Collective over the job: raises an error of any rank on all ranks, with advice on disk errors."""
        with raise_on_all_ranks():
            try:
                yield
            except OSError as error:
                raise UserError(
                    f"checkpoint in '{self.folder}' failed: {error}. Free space or make the folder writable, then "
                    "start the same command again: it continues from the last complete checkpoint."
                ) from error


def remove_folder(folder: Path) -> None:
    """Removes as much of a folder as possible.

    Raises:
        OSError: Something remains; the first error.
    """
    try:
        shutil.rmtree(folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            raise


def _hidden_name(why: str, step: int) -> str:
    """Returns a hidden name that no other save has used."""
    return f".{why}-{step:08d}-{secrets.token_hex(4)}"


def _file_names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def sha256_file(path: Path) -> FileRecord:
    """Returns the size and hash of a file after forcing it to the disk."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256") if hasattr(hashlib, "file_digest") else _digest(stream)
        os.fsync(stream.fileno())
        return FileRecord(os.fstat(stream.fileno()).st_size, digest.hexdigest())


def _digest(stream: Iterable[bytes]) -> Any:
    digest = hashlib.sha256()  # Python 3.10 has no file_digest
    for block in stream:
        digest.update(block)
    return digest
