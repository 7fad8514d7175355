"""Commit points: a checkpoint is whole or it is not there.

Owns the run folder's `checkpoints/`: one folder `step-<n>` per commit, written under a temporary name with the hash of
every file and moved into place last, so that a kill at any moment leaves the last whole one. It does not know what is
inside: the caller's `write` puts the Megatron checkpoint (and whatever else) there.

    checkpoints/step-00000010/   commit.json (files, bytes, sha256)   state.json (the loop's state)   actor/ ...
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrl.config import CheckpointConfig
from mrl.distributed.collectives import together
from mrl.durable import sync_folder, write_file
from mrl.errors import UserError
from mrl.observe.run_dir import committed_steps

FORMAT = 1


class Checkpoints:
    """The commits of one run; every rank holds one and calls each method together."""

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder = folder
        self.config = config
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def steps(self) -> list[int]:
        """Steps with a whole commit, ascending."""
        return committed_steps(self.folder)

    def path(self, step: int) -> Path:
        """Folder of a step's commit."""
        return self.folder / f"step-{step:08d}"

    def save(
        self, step: int, write: Callable[[Path], None], state: dict[str, Any], metric: float | None = None
    ) -> Path:
        """Collective over the job: commits what `write` puts into the folder it is given, and `state` beside it.

        Args:
            step: Names the commit.
            write: Collective over the job; called with an empty folder.
            state: JSON-able.
            metric: Value of `checkpoint.best_metric` now, for `keep_best`; None: unknown.

        Raises:
            UserError: The disk is full or not writable; the commits that were there stay.
        """
        temporary, final = self.folder / f".writing-{step:08d}", self.path(step)
        self._on_first_rank(lambda: _fresh(temporary))
        self._together(lambda: write(temporary))
        self._on_first_rank(lambda: _write_json(temporary / "state.json", state))
        files: dict[str, Any] = {}
        for part in self._each_hashes(temporary, _files(temporary)):
            files |= part
        commit = {"format": FORMAT, "step": step, "metric": metric, "files": dict(sorted(files.items()))}

        def finish() -> None:
            _write_json(temporary / "commit.json", commit)
            sync_folder(temporary)
            if final.exists():
                final.rename(_fresh(self.folder / f".replaced-{step:08d}") / "old")
            temporary.rename(final)
            sync_folder(self.folder)
            self._prune()

        self._on_first_rank(finish)
        return final

    def read(self, path: Path) -> dict[str, Any]:
        """Collective over the job: the state of a commit, after every file of it was compared with its hash.

        Raises:
            UserError: The folder is no commit, or a file is missing or differs.
        """
        commit = read_commit(path)
        names = sorted(commit["files"])
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise _damaged(path, f"'{missing[0]}' is missing")
        for part in self._each_hashes(path, names):
            for name, facts in part.items():
                if facts != commit["files"][name]:
                    raise _damaged(path, f"'{name}' has changed since it was written")
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
        return state

    def _each_hashes(self, folder: Path, names: list[str]) -> list[dict[str, Any]]:
        """Collective over the job: the facts of the files, hashed by the ranks in turn."""
        found: dict[str, Any] = {}
        self._together(
            lambda: found.update({name: _facts(folder / name) for name in names[self.rank :: self.world_size]})
        )
        parts: list[dict[str, Any]] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(parts, found)
        return parts

    def _prune(self) -> None:
        """Deletes what neither `keep_last` nor `keep_best` keeps, and what a killed save left."""
        steps = self.steps()
        keep = set(steps[-self.config.keep_last :])
        if self.config.keep_best:
            ranked = [
                (metric, step) for step in steps if (metric := read_commit(self.path(step))["metric"]) is not None
            ]
            keep |= {step for _, step in sorted(ranked, reverse=True)[: self.config.keep_best]}
        for step in set(steps) - keep:
            shutil.rmtree(self.path(step))
        for leftover in (*self.folder.glob(".writing-*"), *self.folder.glob(".replaced-*")):
            shutil.rmtree(leftover)

    def _on_first_rank(self, action: Callable[[], object]) -> None:
        self._together(action if self.rank == 0 else lambda: None)

    def _together(self, action: Callable[[], object]) -> None:
        """Runs the action; if it fails on any rank, all ranks raise that rank's error."""
        with together():
            try:
                action()
            except OSError as error:
                raise UserError(
                    f"checkpoint in '{self.folder}' failed: {error}. Free space or make the folder writable, then "
                    "start the same command again: it continues from the last whole checkpoint."
                ) from error


def read_commit(path: Path) -> dict[str, Any]:
    """The commit record of a checkpoint folder.

    Raises:
        UserError: The folder is not a commit of this version.
    """
    file = path / "commit.json"
    if not file.is_file():
        raise UserError(
            f"'{path}' is not a checkpoint: it has no commit.json. Give a folder such as RUN/checkpoints/step-00000010."
        )
    try:
        commit: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise _damaged(path, f"'commit.json' is not JSON ({error})") from error
    if commit.get("format") != FORMAT:
        raise UserError(f"checkpoint '{path}' has format {commit.get('format')!r}, this version of mrl reads {FORMAT}.")
    return commit


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"checkpoint '{path}' is damaged: {what}. Remove that folder to continue from the one before it.")


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _facts(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256") if hasattr(hashlib, "file_digest") else _digest(stream)
        os.fsync(stream.fileno())
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def _digest(stream: Iterable[bytes]) -> Any:
    digest = hashlib.sha256()  # Python 3.10 has no file_digest
    for block in stream:
        digest.update(block)
    return digest


def _write_json(file: Path, value: dict[str, Any]) -> None:
    write_file(file, json.dumps(value, indent=1).encode())
