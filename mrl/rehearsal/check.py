"""What the real run refuses, known on a machine that could not run it: the first stage of a rehearsal.

Owns the order of the checks and what is told of a path that only the cluster has. The rules are those of `mrl train`
(`prepare.py`), of its data, rewards and weights, and of `mrl plan` (`fit.py`), at the real sizes and ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mrl import preflight
from mrl.config import Config
from mrl.data.prompts import load_training, load_validation
from mrl.errors import UserError
from mrl.fit import check_fits, device_of
from mrl.formats.hf import HfSource
from mrl.hardware import Hardware
from mrl.memory import memory_by_stage
from mrl.models.base import ArchSpec
from mrl.observe.run_dir import RunDir
from mrl.prepare import Resolved, resolve
from mrl.rehearsal.layout import fewest_ranks
from mrl.rehearsal.report import Report
from mrl.rehearsal.settings import NUM_VAL
from mrl.rehearsal.stand_ins import FLAG, missing_paths, with_stand_ins
from mrl.rewards.scorer import Scorer

PEEKED_PROMPTS = 256
"""Prompts whose length decides the small run's `rollout.prompt_length`."""


@dataclass(frozen=True)
class RealRun:
    """A run that could start on its cluster.

    Attributes:
        config: What was asked for, with what stands in for missing files.
        found: The same, resolved at its world size.
        prompt_length: Longest of the first prompts, tokens.
        ranks: Its world size, and who said so, in words.
    """

    config: Config
    found: Resolved
    prompt_length: int
    ranks: str


def check_real_run(
    config: Config, file: str, world_size: int | None, hardware: Hardware, report: Report, *, stand_ins: bool
) -> RealRun:
    """Everything that a real run refuses before its first step and that needs no rank.

    Args:
        config: What was asked for.
        file: Where it stands; its name may say nodes x GPUs.
        world_size: Ranks of the real run; None: by the file's name, else the fewest that the layout needs.
        hardware: Its GPUs.
        report: Gets the world size, and warnings.
        stand_ins: Whether something may take the place of files that are not here.

    Raises:
        UserError: A mistake in the config, the model folder, the data, the rewards or the run folder.
    """
    missing = missing_paths(config)
    if missing and stand_ins:
        config, told = with_stand_ins(config)
        report.warnings += told
        missing = {}
    by_name = _ranks_of_name(file)
    report.world_size = world_size or by_name or fewest_ranks(preflight.grid_of(config, 1))
    try:
        found = resolve(config, report.world_size)
    except UserError as error:
        if not missing:
            raise
        hint = f"\nTo rehearse without what is on the cluster only ({', '.join(missing)}), add {FLAG}."
        raise UserError(f"{error}{hint}") from error
    _check_writable(config.run.output_dir, report)
    for key, path in (("model.path", config.model.path), ("reference.path", config.reference.path)):
        if path is not None:
            _check_weights(key, path, found.arch, report)
    rollout, tokenizer = found.config.rollout, found.tokenizer
    source = load_training(config.data, tokenizer, prompt_length=rollout.prompt_length, seed=config.run.seed)
    held_out = load_validation(config.data, tokenizer, prompt_length=rollout.prompt_length)
    if not found.algorithm.supervised:
        Scorer(config.reward, tokenizer.decode, tokenizer.eos_ids).close()
    try:
        check_fits(found, hardware, memory_by_stage(found, device_of(hardware, found.grid)))
    except UserError as error:
        report.warnings.append(f"mrl plan refuses the real run: {error}")
    prompts = [*source.next(min(PEEKED_PROMPTS, source.num_rows)), *held_out[:NUM_VAL]]
    fewest = "" if world_size or by_name else " (the fewest of this layout: --world-size)"
    return RealRun(
        config, found, max(len(prompt.prompt_ids) for prompt in prompts), f"{report.world_size} ranks{fewest}"
    )


def _ranks_of_name(file: str) -> int | None:
    """Nodes x GPUs of the config's name, `..._4x8_...`."""
    found = re.search(r"_(\d+)x(\d+)(?=[_.])", Path(file).name)
    return int(found[1]) * int(found[2]) if found else None


def _check_writable(folder: str, report: Report) -> None:
    """The real run's folder, without making it; one below a folder that only the cluster has is not judged."""
    path = Path(folder).absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if there == Path(path.anchor):
        report.warnings.append(f"run.output_dir={folder} is on no disk of this machine: not checked")
        return
    RunDir(path).check_writable()


def _check_weights(key: str, folder: str, arch: ArchSpec, report: Report) -> None:
    """Headers of the real weights, where they are here: a config.json and a tokenizer are enough for a rehearsal."""
    if not any(Path(folder).glob("*.safetensors")):
        report.warnings.append(f"{key}={folder} has no safetensors here: its weights were not looked at")
        return
    with HfSource(folder, arch) as weights:
        weights.check()
