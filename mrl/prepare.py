"""What a run will be, known before any process group exists.

Owns reading and checking everything that needs no other rank: config, model folder, data, run folder. A mistake found
here costs no GPU minute. `job.py` brings the job up from the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mrl import preflight
from mrl.algorithms import base as algorithms
from mrl.algorithms.base import Algorithm
from mrl.config import Config
from mrl.data.prompts import PromptSource, load_training, load_validation
from mrl.data.tokenizer import Tokenizer, load_tokenizer
from mrl.distributed import launch
from mrl.engines.trtllm import fields as trtllm
from mrl.errors import UserError
from mrl.grid import Grid
from mrl.models.base import ArchSpec
from mrl.models.hf_config import arch_from_folder
from mrl.models.presets import arch_from_preset
from mrl.observe.run_dir import RunDir
from mrl.steps import with_num_steps
from mrl.types import Prompt


@dataclass
class Resolved:
    """A config that fits its model and its ranks.

    Attributes:
        config: The algorithm's nulls are filled.
        grid: Who sits where.
    """

    config: Config
    arch: ArchSpec
    tokenizer: Tokenizer
    algorithm: Algorithm
    grid: Grid


@dataclass
class Plan(Resolved):
    """What a job will be, known before any process group exists.

    Attributes:
        validation: Held-out prompts, maybe none.
        resume_step: Step of the commit to continue from; None: from nothing.
    """

    source: PromptSource
    validation: list[Prompt]
    run: RunDir
    resume_step: int | None


def prepare(config: Config) -> Plan:
    """Reads and checks everything that needs no other rank.

    Raises:
        UserError: A mistake in the config, the model folder, the data or the run folder.
    """
    if config.rollout.name in trtllm.ENGINES:
        trtllm.check_launcher(config.rollout, launch.environment().launcher)
    if config.rollout.name == "trtllm":
        launch.see_own_device_only()  # before torch looks for devices
    launch.choose_device(config.run.device)
    found = resolve(config, launch.environment().world_size)
    config, tokenizer, rollout = found.config, found.tokenizer, found.config.rollout
    source = load_training(config.data, tokenizer, prompt_length=rollout.prompt_length, seed=config.run.seed)
    found.config = config = with_num_steps(config, source.num_rows)
    preflight.check_config(config, found.grid.world_size)  # again, with the steps that the epochs give
    validation = load_validation(config.data, tokenizer, prompt_length=rollout.prompt_length)
    run = RunDir(Path(config.run.output_dir))
    return Plan(**vars(found), source=source, validation=validation, run=run, resume_step=_resume_step(config, run))


def resolve(config: Config, world_size: int) -> Resolved:
    """Fills the algorithm's nulls, reads the model's structure and tokenizer, and checks every rule for so many ranks.

    Raises:
        UserError: A mistake in the config or the model folder.
    """
    algorithm = algorithms.build(config.algorithm, config.rollout)
    config = replace(config, algorithm=algorithm.config)
    arch, tokenizer = load_model_facts(config)
    preflight.check(config, arch, world_size, tokenizer.vocab_size, supervised=algorithm.supervised)
    return Resolved(config, arch, tokenizer, algorithm, preflight.grid_of(config, world_size))


def load_model_facts(config: Config) -> tuple[ArchSpec, Tokenizer]:
    """Structure and tokenizer of the model that the config names."""
    model = config.model
    if model.path is not None:
        arch = arch_from_folder(model.path)
        return arch, load_tokenizer(model, config.data, arch.vocab_size)
    tokenizer = load_tokenizer(model, config.data)
    if model.preset is None:
        raise UserError("model.path and model.preset are both null: there is no model. Set one of them.")
    return arch_from_preset(model.preset, model.overrides, tokenizer.vocab_size), tokenizer


def _resume_step(config: Config, run: RunDir) -> int | None:
    steps = run.committed_steps()
    if config.run.resume == "must" and not steps:
        raise UserError(
            f"run.resume=must, but '{run.checkpoints}' has no checkpoint. Use run.resume=auto to start from nothing."
        )
    if config.run.resume == "never" and steps and not launch.is_restart():
        raise UserError(
            f"run.resume=never, but '{run.checkpoints}' has a checkpoint of step {steps[-1]}. Use another "
            "run.output_dir, or run.resume=auto to continue."
        )
    return steps[-1] if steps else None
