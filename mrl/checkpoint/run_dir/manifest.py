"""What a commit says of itself: commit.json, and which folders of `checkpoints/` are whole.

Owns the record's format, its reading and the names of commits. It hashes nothing and needs no process group: what is
written, compared and removed is `checkpoint.py`'s.

    checkpoints/step-00000010/commit.json    {"format", "step", "metric", "files": {name: {"bytes", "sha256"}}}
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
RECORD, STATE = "commit.json", "state.json"
ADVICE = "Remove that folder to continue from the one before it."
GONE = (FileNotFoundError, NotADirectoryError)
_SHA256 = re.compile(r"[0-9a-f]{64}")


class DamagedError(UserError):
    """A commit that is not what was written: an older one may be whole."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"checkpoint '{path}' is damaged: {what}. {ADVICE}")
        self.path, self.what = path, what

    def __reduce__(self) -> tuple[type[DamagedError], tuple[Path, str]]:
        """Ranks send it to each other."""
        return DamagedError, (self.path, self.what)


@dataclass(frozen=True)
class File:
    """A file of a commit: its size and the hash of its content."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Commit:
    """A commit's record.

    Attributes:
        step: Steps done.
        metric: `checkpoint.best_metric` then; None: unknown.
        files: By their names in the folder, with slashes; all but the record itself.
    """

    step: int
    metric: float | None
    files: Mapping[str, File]

    def encode(self) -> bytes:
        """The content of commit.json."""
        files = {name: asdict(self.files[name]) for name in sorted(self.files)}
        record = {"format": FORMAT, "step": self.step, "metric": self.metric, "files": files}
        return json.dumps(record, indent=1).encode()


def folder_name(step: int) -> str:
    """Of a step's commit."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a folder of commits names; None: it is no commit's name."""
    number = path.name.removeprefix("step-")
    if not (number.isascii() and number.isdigit()) or folder_name(int(number)) != path.name:
        return None
    return int(number)


def has_record(path: Path) -> bool:
    """Whether a folder has a record, of whatever content; one that cannot be looked at may have."""
    try:
        (path / RECORD).lstat()
    except GONE:
        return False
    except OSError:
        return True
    return True


def committed_steps(folder: Path) -> list[int]:
    """Steps with a whole commit under a `checkpoints/` folder, as far as the records tell, ascending."""
    steps = []
    for path in folder.glob("step-*"):
        try:
            read_commit(path)
        except UserError:
            continue
        if (step := step_of(path)) is not None:
            steps.append(step)
    return sorted(steps)


def read_commit(path: Path) -> Commit:
    """The record of a checkpoint folder.

    Raises:
        DamagedError: The record is not one of a whole commit.
        UserError: The folder has no record, one of another version, or one that cannot be read.
    """
    record = read_object(path, RECORD)
    version = record.get("format")
    if isinstance(version, int) and version != FORMAT:
        raise UserError(f"checkpoint '{path}' has format {version}, this version of mrl reads {FORMAT}.")
    if type(version) is not int:
        raise DamagedError(path, f"'{RECORD}' names no format")
    step, metric, files = record.get("step"), record.get("metric"), record.get("files")
    if type(step) is not int or step_of(path) not in (None, step):
        raise DamagedError(path, f"'{RECORD}' is of another step ({_short(step)})")
    if metric is not None and type(metric) is not float and type(metric) is not int:
        raise DamagedError(path, f"'{RECORD}' has a metric that is no number ({_short(metric)})")
    if not isinstance(files, dict) or STATE not in files:
        raise DamagedError(path, f"'{RECORD}' does not name the files of a checkpoint")
    found = {name: _file(path, name, facts) for name, facts in files.items()}
    return Commit(step, metric if metric is not None and abs(metric) < math.inf else None, found)


def check_files(path: Path, commit: Commit) -> None:
    """Looks whether the files are there in their sizes; their content is not read.

    Raises:
        DamagedError: One is missing, or shorter or longer than it was.
    """
    for name, facts in commit.files.items():
        try:
            found = os.stat(path / name)
        except (*GONE, ValueError) as error:
            raise DamagedError(path, f"'{name}' is missing") from error
        except OSError as error:
            raise _unreadable(path, name, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise DamagedError(path, f"'{name}' is no file")
        if found.st_size != facts.bytes:
            raise DamagedError(path, f"'{name}' has {found.st_size} bytes, and had {facts.bytes}")


def read_object(path: Path, name: str) -> dict[str, Any]:
    """A JSON object in a file of a commit.

    Raises:
        DamagedError: The file holds something else.
        UserError: There is no such file, or it cannot be read.
    """
    file = path / name
    try:
        if file.exists() and not file.is_file():
            raise DamagedError(path, f"'{name}' is no file")
        value = json.loads(file.read_bytes())
    except GONE as error:
        raise UserError(
            f"'{path}' is not a checkpoint: it has no {name}.{did_you_mean_path(path)} Give a folder such as "
            f"RUN/checkpoints/{folder_name(10)}."
        ) from error
    except OSError as error:
        raise _unreadable(path, name, error) from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(path, f"'{name}' is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise DamagedError(path, f"'{name}' holds {_short(value)}, expected an object")
    return value


def _file(path: Path, name: str, facts: Any) -> File:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name or str(PurePosixPath(name)) != name:
        raise DamagedError(path, f"'{RECORD}' names {_short(name)}, which is no file of the folder")
    size = facts.get("bytes") if isinstance(facts, dict) else None
    digest = facts.get("sha256") if isinstance(facts, dict) else None
    if type(size) is not int or size < 0 or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise DamagedError(path, f"'{RECORD}' has no size and hash of {_short(name)}")
    return File(size, digest)


def _unreadable(path: Path, name: str, error: OSError) -> UserError:
    """Not damaged: what a disk or a network does not give now may be there later."""
    return UserError(f"checkpoint '{path}': '{name}' cannot be read: {error.strerror}. Mend that and start again.")


def _short(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", type(None): "null"}
    return kinds.get(type(value)) or repr(value)[:40]
