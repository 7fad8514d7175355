"""Manifest of a checkpoint (commit.json), and which folders in `checkpoints/` are complete checkpoints.

    checkpoints/step-00000010/commit.json    {"format", "step", "metric", "files": {name: {"bytes", "sha256"}}}

It hashes nothing and needs no process group; `checkpoint.py` writes, verifies and removes checkpoints.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mrl.config.did_you_mean import did_you_mean_path
from mrl.errors import UserError

FORMAT = 1
MANIFEST_FILE, STATE_FILE = "commit.json", "state.json"
ADVICE = "Remove that folder to continue from the one before it."
NOT_FOUND_ERRORS = (FileNotFoundError, NotADirectoryError)
_SHA256 = re.compile(r"[0-9a-f]{64}")


class DamagedCheckpointError(UserError):
    """A checkpoint that differs from what was written; an older one may be intact."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"checkpoint '{path}' is damaged: {what}. {ADVICE}")
        self.path, self.what = path, what

    def __reduce__(self) -> tuple[type[DamagedCheckpointError], tuple[Path, str]]:
        """Makes the error picklable: ranks exchange it."""
        return DamagedCheckpointError, (self.path, self.what)


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of a file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Manifest of a checkpoint.

    Attributes:
        step: Number of completed steps.
        metric: Value of `checkpoint.best_metric` at that step; None: unknown.
        files: Path in the folder, with slashes -> size and hash; all files except the manifest itself.
    """

    step: int
    metric: float | None
    files: Mapping[str, FileRecord]

    def encode(self) -> bytes:
        """Returns the content of commit.json."""
        files = {name: asdict(self.files[name]) for name in sorted(self.files)}
        record = {"format": FORMAT, "step": self.step, "metric": self.metric, "files": files}
        return json.dumps(record, indent=1).encode()


def folder_name(step: int) -> str:
    """Returns the name of a step's checkpoint folder."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Returns the step that a folder's name encodes; None if it is not the name of a checkpoint."""
    number = path.name.removeprefix("step-")
    if not (number.isascii() and number.isdigit()) or folder_name(int(number)) != path.name:
        return None
    return int(number)


def has_manifest(path: Path) -> bool:
    """Returns whether a folder has a manifest, valid or not; True if it cannot be read."""
    try:
        (path / MANIFEST_FILE).lstat()
    except NOT_FOUND_ERRORS:
        return False
    except OSError:
        return True
    return True


def committed_steps(folder: Path) -> list[int]:
    """Returns the steps with a valid manifest in a `checkpoints/` folder, ascending."""
    steps = []
    for path in folder.glob("step-*"):
        try:
            read_manifest(path)
        except UserError:
            continue
        if (step := step_of(path)) is not None:
            steps.append(step)
    return sorted(steps)


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of a checkpoint folder.

    Raises:
        DamagedCheckpointError: The manifest is invalid.
        UserError: The folder has no manifest, one of another version, or one that cannot be read.
    """
    record = read_json_object(path, MANIFEST_FILE)
    version = record.get("format")
    if isinstance(version, int) and version != FORMAT:
        raise UserError(f"checkpoint '{path}' has format {version}, this version of mrl reads {FORMAT}.")
    if type(version) is not int:
        raise DamagedCheckpointError(path, f"'{MANIFEST_FILE}' has no integer 'format'")
    step, metric, files = record.get("step"), record.get("metric"), record.get("files")
    if type(step) is not int or step_of(path) not in (None, step):
        raise DamagedCheckpointError(
            path, f"'{MANIFEST_FILE}' has another step than the folder's name ({_shortened(step)})"
        )
    if metric is not None and type(metric) is not float and type(metric) is not int:
        raise DamagedCheckpointError(path, f"'metric' in '{MANIFEST_FILE}' is not a number ({_shortened(metric)})")
    if not isinstance(files, dict) or STATE_FILE not in files:
        raise DamagedCheckpointError(path, f"'files' in '{MANIFEST_FILE}' lacks '{STATE_FILE}' or is not an object")
    found = {name: _file_record(path, name, facts) for name, facts in files.items()}
    return Manifest(step, metric if metric is not None and abs(metric) < math.inf else None, found)


def check_files(path: Path, manifest: Manifest) -> None:
    """Checks that all files exist with their recorded sizes; does not read their content.

    Raises:
        DamagedCheckpointError: A file is missing, or shorter or longer than recorded.
    """
    for name, facts in manifest.files.items():
        try:
            found = os.stat(path / name)
        except (*NOT_FOUND_ERRORS, ValueError) as error:
            raise DamagedCheckpointError(path, f"'{name}' is missing") from error
        except OSError as error:
            raise _unreadable(path, name, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise DamagedCheckpointError(path, f"'{name}' is not a regular file")
        if found.st_size != facts.bytes:
            raise DamagedCheckpointError(path, f"'{name}' has {found.st_size} bytes, expected {facts.bytes}")


def read_json_object(path: Path, name: str) -> dict[str, Any]:
    """Reads a JSON object from a file of a checkpoint.

    Raises:
        DamagedCheckpointError: The file has other content.
        UserError: The file does not exist or cannot be read.
    """
    file = path / name
    try:
        if file.exists() and not file.is_file():
            raise DamagedCheckpointError(path, f"'{name}' is not a regular file")
        value = json.loads(file.read_bytes())
    except NOT_FOUND_ERRORS as error:
        raise UserError(
            f"'{path}' is not a checkpoint: it has no {name}.{did_you_mean_path(path)} Give a folder such as "
            f"RUN/checkpoints/{folder_name(10)}."
        ) from error
    except OSError as error:
        raise _unreadable(path, name, error) from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(path, f"'{name}' is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise DamagedCheckpointError(path, f"'{name}' contains {_shortened(value)}, expected an object")
    return value


def _file_record(path: Path, name: str, facts: Any) -> FileRecord:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name or str(PurePosixPath(name)) != name:
        raise DamagedCheckpointError(
            path, f"'{MANIFEST_FILE}' lists {_shortened(name)}, which is not a path inside the folder"
        )
    size = facts.get("bytes") if isinstance(facts, dict) else None
    digest = facts.get("sha256") if isinstance(facts, dict) else None
    if type(size) is not int or size < 0 or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise DamagedCheckpointError(path, f"'{MANIFEST_FILE}' lacks a valid size or hash for {_shortened(name)}")
    return FileRecord(size, digest)


def _unreadable(path: Path, name: str, error: OSError) -> UserError:
    """Returns the error for a file that cannot be read: not damage, the disk or network may recover."""
    return UserError(f"checkpoint '{path}': '{name}' cannot be read: {error.strerror}. Fix that and start again.")


def _shortened(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", type(None): "null"}
    return kinds.get(type(value)) or repr(value)[:40]
