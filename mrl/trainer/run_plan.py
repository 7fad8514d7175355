"""Resolution and validation of a config before any process group exists: model, data, rewards, run folder.

`check_run` has all checks that `mrl train`, its dry run, `launch`, `plan` and `rehearse` share, so that a mistake is
found before GPUs are in use. `build_run_plan` adds the checks that only a starting run can do. `trainer.py` builds the
run from the result.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mrl.algorithms import base as algorithms
from mrl.algorithms.base import PROXIMAL, Algorithm
from mrl.checkpoint.formats.hf import HfSource
from mrl.checkpoint.formats.hub import resolve_hub_models, resolve_hub_names
from mrl.checkpoint.formats.peft import open_adapters
from mrl.checkpoint.run_dir.manifest import has_manifest
from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.config.config import AlgorithmConfig, Config, DataConfig, LearnsFrom, ModelConfig
from mrl.config.registry import check_subclass, find, names
from mrl.data.assistant_mask import end_token_warning
from mrl.data.prompts import PromptSource, load_training, load_validation
from mrl.data.public_sets.base import find as find_set
from mrl.data.tokenizer import Tokenizer, load_tokenizer
from mrl.distributed import launch
from mrl.engines._capabilities import engine_capabilities
from mrl.engines.base import RolloutEngine
from mrl.errors import UserError, shown
from mrl.models import transformer_engine
from mrl.models._positions import for_run, notes, position_limit
from mrl.models.base import ArchSpec, critic_of
from mrl.models.hf_config import arch_from_folder
from mrl.models.presets import arch_from_preset
from mrl.observability.metrics import check_is_given, evaluation_names
from mrl.observability.run_log import logger_names
from mrl.parallel_layout import ParallelLayout
from mrl.rewards.scorer import Scorer
from mrl.rollout.episodes.episodes import Schema, check_environment
from mrl.trainer.callbacks import check_callbacks
from mrl.trainer.reward_model_inputs import RewardModelEncoder, build_reward_encoder
from mrl.trainer.run_length import with_num_steps
from mrl.trainer.supervised import examples
from mrl.trainer.validation import validate
from mrl.trainer.validation.critic import adapters_of, check_critic
from mrl.trainer.validation.data import needed_evaluation_metrics
from mrl.trainer.validation.distillation import check_distillation, check_named, teacher_index
from mrl.trainer.validation.megatron import SWITCHES, check_switches
from mrl.trainer.validation.nearest_layout import nearest_layout
from mrl.trainer.validation.off_policy import with_async_correction
from mrl.trainer.validation.parallel import build_parallel_layout
from mrl.trainer.validation.reward_model import check_reward_model, reward_arch
from mrl.trainer.validation.true_on_policy import check_device
from mrl.types import Prompt

PEEKED_PROMPTS = 256
"""Number of training prompts that are encoded before a run starts."""

CHECKED_ROWS = 32
"""Number of training rows, and of held-out rows, that reward functions are tried on before a run starts."""

Tell = Callable[[str], None]
"""Receiver of notes about things that could not be checked on this machine."""


@dataclass
class Resolved:
    """Config that is valid for its model and number of ranks.

    Attributes:
        config: Settings with the algorithm's defaults filled in.
        arch: Architecture of the actor.
        tokenizer: Tokenizer of the actor.
        algorithm: Algorithm object.
        grid: Parallel layout of the job.
        critic: Architecture of the critic; None if the algorithm has none.
        teachers: Architectures of `distillation.teacher_models`, in order; empty without distillation.
        reward: Architecture of the reward model; None if there is none.
        reward_encoder: Encoder of samples for the reward model.
    """

    config: Config
    arch: ArchSpec
    tokenizer: Tokenizer
    algorithm: Algorithm
    grid: ParallelLayout
    critic: ArchSpec | None
    teachers: tuple[ArchSpec, ...]
    reward: ArchSpec | None
    reward_encoder: RewardModelEncoder | None

    @property
    def needs_engine(self) -> bool:
        """True if the run samples, to train on or for held-out prompts."""
        return not self.algorithm.supervised or self.config.data.task is not None or bool(self.config.data.val_files)

    @property
    def scores_proximal(self) -> bool:
        """True if each step runs a separate forward pass for the proximal log-probabilities."""
        train, by_update = self.config.train, PROXIMAL not in self.algorithm.reads_early
        by_update = by_update and train.minibatch_size in (None, train.batch_size)
        return self.algorithm.needs_proximal and not (by_update and self.config.actor.router_replay != "recompute")


@dataclass
class CheckedConfig(Resolved):
    """Resolved config that passed all checks on this machine.

    Attributes:
        source: Training prompts, at the first one.
        validation: Held-out prompts; may be empty.
        first_prompts: First `PEEKED_PROMPTS` training prompts.
        tools: Tool schemas of the environment.
        warnings: Log lines about likely mistakes.
    """

    source: PromptSource
    validation: list[Prompt]
    first_prompts: list[Prompt]
    tools: list[Schema]
    warnings: list[str]


@dataclass
class RunPlan(CheckedConfig):
    """Everything that a job is built from; made before any process group exists.

    Attributes:
        run: Run folder.
    """

    run: RunDir


def build_run_plan(config: Config, *, resumes: bool = True) -> RunPlan:
    """Resolves and checks the config of a run that starts now, without communication.

    Args:
        config: Config as loaded.
        resumes: True to check `run.resume` against the run folder; False if the folder is only read.

    Raises:
        UserError: A mistake in the config, the model folder, the data, the rewards or the run folder.
    """
    if not isinstance(config, Config):
        raise UserError(f"Got {shown(config)}, expected a Config. Pass the result of `mrl.load_config`.")
    here = launch.get_launcher_env()
    capabilities = engine_capabilities(config.rollout.name)
    if capabilities.sees_own_device_only:
        launch.hide_other_devices()  # before torch enumerates the devices
    device = launch.choose_device(config.run.device)
    check_switches(config, launch.get_env(*SWITCHES))
    found = check_run(resolve_hub_names(config, download=True), here.world_size, launcher=here.launcher)
    transformer_engine.check(found.config, found.arch, device)
    check_device(found.config, device)
    if found.needs_engine:
        capabilities.check_installed()
    if resumes:
        check_run_folder(config)
    return RunPlan(**vars(found), run=RunDir(Path(config.run.output_dir)))


def check_run(
    config: Config, world_size: int, *, launcher: str | None = None, tell: Tell | None = None
) -> CheckedConfig:
    """Runs all checks of a config and of the files it names.

    Args:
        config: Config as loaded.
        world_size: Number of ranks of the run.
        launcher: Launcher of the ranks as in `LauncherEnv.launcher`; None: unknown.
        tell: Receives notes about files that are missing here (weights, disk of the run folder), if the run may be on
            another machine. None: missing files are errors.

    Raises:
        UserError: A mistake in the config, the model folder, the data, the rewards or the run folder.
    """
    if launcher is not None:
        engine_capabilities(config.rollout.name).check_launcher(config.rollout, launcher)
    config = resolve_hub_names(config)
    found = resolve(config, world_size)
    _check_engine(config.rollout.name)
    _check_loggers(config, tell)
    check_callbacks(config)
    _check_output_dir(config.run.output_dir, tell)
    _check_models(config, found, tell)
    tokenizer, prompt_length = found.tokenizer, config.rollout.prompt_length
    tools = check_environment(config.rollout, tokenizer) if config.rollout.multi_turn.enable else []
    source = load_training(config.data, tokenizer, prompt_length=prompt_length, seed=config.run.seed, tools=tools)
    source.check_order()
    found.config, original = with_num_steps(found.config, source.num_rows), found.config
    if found.config.train.num_steps != original.train.num_steps:
        # The number of steps follows from the data, so rules about steps are checked again.
        validate.check_config(found.config, world_size, learns_from=found.algorithm.learns_from)
        check_critic(found.config, found.arch, found.critic, found.grid)
    validation = load_validation(config.data, tokenizer, prompt_length=prompt_length, tools=tools)
    _check_metrics(config)
    peeked = source.peek(PEEKED_PROMPTS)
    one_worker = replace(config.reward, num_workers=1)
    with Scorer(one_worker, tokenizer.decode, tokenizer.eos_ids, variables=launch.get_env) as scorer:
        episodes = config.rollout.multi_turn.enable
        try:
            warnings = _check_training(config, found, tools, scorer, peeked)
        except UserError:
            # Prompts are shuffled: if all rows are wrong, name the first row of the file.
            _check_training(config, found, tools, scorer, source.first(len(peeked)))
            raise
        warnings += [*_conversion_notes(config, source), *notes(found.arch, config.rollout.max_sequence_length)]
        warnings += scorer.check_rows(validation[:CHECKED_ROWS], "held-out", episodes=episodes)
    # Supervised steps check for missing end tokens row by row.
    samples_chats = not found.algorithm.supervised and any(isinstance(prompt.question, list) for prompt in peeked)
    warning = end_token_warning(tokenizer, tools) if samples_chats else None
    return CheckedConfig(
        **vars(found),
        source=source,
        validation=validation,
        first_prompts=peeked,
        tools=tools,
        warnings=[*warnings, *([] if warning is None else [warning])],
    )


def _check_metrics(config: Config) -> None:
    """Checks that the evaluation reports the metrics that the run depends on."""
    known = evaluation_names(config.rollout.val_kwargs.n, episodes=config.rollout.multi_turn.enable)
    for key, metric in needed_evaluation_metrics(config).items():
        if metric.startswith("val/"):
            check_is_given(key, metric, known)


def _conversion_notes(config: Config, source: PromptSource) -> list[str]:
    """Returns a line for each public data set whose raw rows are converted, and whether another reward is its own."""
    notes, functions = [], config.reward.functions
    for name in source.conversions:
        reward = find_set(name).reward["name"]
        first = functions[0].name if functions else None
        other = "" if first in (None, reward) else f", and its reward is {reward}, not {first} (reward.functions)"
        notes.append(f"raw rows of {name} are converted as by `mrl data {name}`{other}")
    return notes


def _check_training(
    config: Config, plan: Resolved, tools: list[Schema], scorer: Scorer, prompts: list[Prompt]
) -> list[str]:
    """Checks training prompts with teachers, reward model, supervised loss and reward functions; returns warnings."""
    for prompt in prompts if plan.teachers else ():
        teacher_index(config.distillation, prompt)
    for prompt in prompts if plan.reward_encoder is not None and plan.reward_encoder.own_tokenizer is not None else ():
        _check_rendered(plan.reward_encoder, prompt)
    if plan.algorithm.supervised:
        examples(prompts, plan.tokenizer, config, tools, learns_from=plan.algorithm.learns_from)
    if config.train.warm_start.num_steps:
        examples(prompts, plan.tokenizer, config, tools)
    scored = [] if plan.algorithm.supervised else prompts[:CHECKED_ROWS]
    return scorer.check_rows(scored, "training", episodes=config.rollout.multi_turn.enable)


def resolve(config: Config, world_size: int) -> Resolved:
    """Fills in the algorithm's defaults, reads architecture and tokenizer, and checks all rules for `world_size` ranks.

    Raises:
        UserError: A mistake in the config or the model folder.
    """
    algorithm = algorithms.build(config.algorithm, config.rollout)
    if not algorithm.supervised and (corrected := with_async_correction(config)) is not config:
        config, algorithm = corrected, algorithms.build(corrected.algorithm, config.rollout)
    config = resolve_hub_names(replace(config, algorithm=algorithm.config))
    arch, tokenizer = load_arch_and_tokenizer(config)
    _check_settings(config, arch, world_size, tokenizer.vocab_size, algorithm.learns_from)
    grid, longest = build_parallel_layout(config, world_size), config.rollout.max_sequence_length
    critic = None
    if algorithm.needs_values:
        critic = critic_of(arch if config.critic.path is None else arch_from_folder(config.critic.path))
        critic = for_run(critic, longest)
    check_critic(config, arch, critic, grid)
    teachers = _teachers(config, arch)
    own = algorithms.resolve(AlgorithmConfig(name=config.algorithm.name))
    check_distillation(
        config, arch, teachers, grid, own, supervised=algorithm.supervised, critic=algorithm.needs_values
    )
    reward = reward_arch(config)
    reader = None if reward is None else build_reward_encoder(config, tokenizer, reward)
    retokenizes = reader is not None and reader.own_tokenizer is not None
    check_reward_model(config, arch, reward, grid, retokenizes=retokenizes)
    if reward is not None:
        reward = for_run(reward, position_limit(reward) if retokenizes else longest)
    return Resolved(config, arch, tokenizer, algorithm, grid, critic, teachers, reward, reader)


def _check_settings(config: Config, arch: ArchSpec, world_size: int, vocab_size: int, learns_from: LearnsFrom) -> None:
    """Checks all rules; where the layout does not divide model or ranks, the error names the nearest that does."""

    def check(other: Config) -> None:
        validate.check(other, arch, world_size, vocab_size, learns_from=learns_from)

    try:
        check(config)
    except UserError as error:
        advice = nearest_layout(config, arch, world_size, check)
        if not advice:
            raise
        raise UserError(f"{error}\n{advice}") from error


def _teachers(config: Config, arch: ArchSpec) -> tuple[ArchSpec, ...]:
    check_named(config)
    if not config.distillation.enabled:
        return ()
    found, longest = [], config.rollout.max_sequence_length
    for index, teacher in enumerate(config.distillation.teacher_models):
        sizes = {"vocab_size": arch.vocab_size, **teacher.overrides}
        try:
            own = (
                arch_from_folder(str(teacher.model_path))
                if teacher.preset is None
                else arch_from_preset(teacher.preset, sizes, arch.vocab_size)
            )
            found.append(for_run(own, longest))
        except UserError as error:
            raise UserError(f"distillation.teacher_models[{index}]: {error}") from error
    return tuple(found)


def load_arch_and_tokenizer(config: Config) -> tuple[ArchSpec, Tokenizer]:
    """Reads the architecture and the tokenizer of the config's model."""
    model, longest = resolve_hub_models(config).model, config.rollout.max_sequence_length
    if model.path is not None:
        arch = for_run(arch_from_folder(model.path), longest)
        return arch, load_tokenizer(model, config.data, arch.vocab_size)
    tokenizer = load_tokenizer(model, config.data)
    if model.preset is None:
        raise UserError("model.path and model.preset are both null. Set one of them.")
    return for_run(arch_from_preset(model.preset, model.overrides, tokenizer.vocab_size), longest), tokenizer


def check_run_folder(config: Config) -> None:
    """Checks `run.resume` against the run folder, without reading the checkpoints.

    Raises:
        UserError: The folder has a checkpoint that `run.resume` forbids, or lacks one that it requires.
    """
    run = RunDir(Path(config.run.output_dir))
    steps = run.committed_steps()
    if steps or not any(
        has_manifest(path) for path in run.checkpoints.glob("step-*")
    ):  # damaged ones are reported later
        check_resume(config, run, steps[-1] if steps else None)


def check_resume(config: Config, run: RunDir, step: int | None) -> None:
    """Checks `run.resume` against the step of the last checkpoint, None if there is none.

    Raises:
        UserError: run.resume=must without a checkpoint, or run.resume=never with one.
    """
    if config.run.resume == "must" and step is None:
        raise UserError(
            f"run.resume=must, but '{run.checkpoints}' has no checkpoint. Use run.resume=auto to start a new run."
        )
    if config.run.resume == "never" and step is not None and not launch.is_restart():
        raise UserError(
            f"run.resume=never, but '{run.checkpoints}' has a checkpoint of step {step}. Use another "
            "run.output_dir, or run.resume=auto to continue."
        )


def _check_engine(name: str) -> None:
    """Imports a user-defined engine; mrl's own engines need packages that this machine may lack."""
    if name in names("engines"):
        return
    check_subclass(f"rollout.name={name}", find("engines", name, "ENGINE"), RolloutEngine)


def _check_loggers(config: Config, tell: Tell | None) -> None:
    """Checks that the packages of the loggers are installed."""
    for name, _ in logger_names(config):
        find("observability.loggers", name, "LOGGER")
        if name not in names("observability.loggers"):
            continue
        check = find("observability.loggers", name, "check", None)
        try:
            if check is not None:
                check(config)
        except UserError as error:
            if tell is None:
                raise
            tell(f"on this machine {error}")


def _check_output_dir(folder: str, tell: Tell | None) -> None:
    """Checks that the run folder is writable, without creating it."""
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if tell is not None and existing == Path(path.anchor) != path:
        tell(f"run.output_dir={folder} is on no disk of this machine: not checked")
    else:
        RunDir(Path(folder)).check_writable()


def _check_models(config: Config, plan: Resolved, tell: Tell | None) -> None:
    """Checks the weight files of every model that the config names, and the teachers' tokenizers."""
    actor, critic = config.actor.lora, adapters_of(config)
    reference = config.reference.path
    if actor.rank and reference not in (None, config.model.path):  # adapters, not a model
        open_adapters(reference, plan.arch, actor, "actor.lora")
        reference = None
    if actor.rank and actor.adapter_path is not None:
        open_adapters(actor.adapter_path, plan.arch, actor, "actor.lora")
    if critic.rank and critic.adapter_path is not None and plan.critic is not None:
        open_adapters(critic.adapter_path, plan.critic, critic, "critic.lora")
    for key, path, arch in (
        ("model.path", config.model.path, plan.arch),
        ("reference.path", reference, plan.arch),
        ("critic.path", config.critic.path, None),
        ("reward.model.path", config.reward.model.path, plan.reward),
    ):
        if path is not None:
            _check_weights(key, path, arch, tell)
    for index, (teacher, arch) in enumerate(zip(config.distillation.teacher_models, plan.teachers, strict=False)):
        if teacher.model_path is not None:
            key = f"distillation.teacher_models[{index}].model_path"
            _check_weights(key, teacher.model_path, arch, tell)
            _check_tokens(key, teacher.model_path, plan.tokenizer)


def _check_rendered(reader: RewardModelEncoder | None, prompt: Prompt) -> None:
    """Checks that the reward model can encode a prompt."""
    try:
        if reader is not None:
            reader.render(prompt, "")
    except UserError as error:
        raise UserError(f"{prompt.source}: the reward model cannot encode this prompt: {error}") from error


def _check_tokens(key: str, folder: str, tokenizer: Tokenizer) -> None:
    """Checks that a teacher has the student's vocabulary."""
    try:
        teacher = load_tokenizer(ModelConfig(path=folder), DataConfig()).vocabulary
    except UserError as error:
        raise UserError(f"{key}={folder}: {error}") from error
    student = tokenizer.vocabulary
    if teacher != student:
        token = min((set(student.items()) ^ set(teacher.items())), key=lambda item: (item[1], item[0]))[0]
        ids = [f"{vocabulary[token]}" if token in vocabulary else "none" for vocabulary in (student, teacher)]
        raise UserError(
            f"{key}={folder} has another tokenizer than the student: the id of {token!r} is {ids[0]} for the student "
            f"and {ids[1]} for the teacher; they have {len(student)} and {len(teacher)} tokens. Choose a teacher with "
            "the student's tokenizer, because it scores the student's token ids."
        )


def _check_weights(key: str, folder: str, arch: ArchSpec | None, tell: Tell | None) -> None:
    """Checks the headers of a model's weight files."""
    if tell is not None and not any(Path(folder).glob("*.safetensors")):
        tell(f"{key}={folder} has no safetensors files on this machine: weights not checked")
        return
    with HfSource(folder, arch) as weights:
        weights.check()
