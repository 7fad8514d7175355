"""Checks of a config and its files: the model folder, data, and the size of the run's checkpoints.

The rules between settings are those of `trainer/validation/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mrl.algorithms import base as algorithms
from mrl.checkpoint.formats.hf import HfSource
from mrl.checkpoint.formats.hub import resolve_model_path
from mrl.commands.doctor.finding import Finding, ok, problem
from mrl.commands.plan.memory import num_parameters, trained_dtype
from mrl.commands.plan.optimizer_memory import optimizer_memory
from mrl.config.config import Config
from mrl.data.hub_files import SPLITS, paths_of
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.resharding import lora
from mrl.resharding.copy_op import ITEM_BYTES
from mrl.trainer.run_plan import resolve
from mrl.trainer.validation.critic import adapters_of, critic_config
from mrl.trainer.validation.world_size import world_size

GB = 1e9


def check_config(config: Config, file: str, started: int) -> Iterator[Finding]:
    """Checks the model's structure, the tokenizer, the parallel layout, and all rules between settings.

    Args:
        config: Run config.
        file: Path of the config file.
        started: Number of ranks of the running job.

    Raises:
        UserError: Invalid config or model folder.
    """
    size = world_size(config, file, None, started=started)
    found = resolve(config, size.ranks)
    grid = found.grid
    layout = f"fits {grid.world_size} ranks ({size.why}): "
    layout += f"tp {grid.tp} x cp {grid.cp} x dp {grid.dp} x pp {grid.pp}"
    layout += f", and {grid.rollout_ranks} for rollouts only" if grid.has_separate_rollout else ""
    model = config.model.path or config.model.preset
    yield ok("config", f"{model}: {num_parameters(found.arch) / GB:.3g} x 10^9 parameters; {layout}")


def models_of(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (topic, folder) of each model folder that the config names."""
    reference = None if config.actor.lora.rank else config.reference.path  # with adapters: these, or model.path
    for topic, path in (
        ("model", config.model.path),
        ("reference", reference),
        ("critic", config.critic.path),
        ("reward model", config.reward.model.path),
    ):
        if path is not None:
            yield topic, path


def check_model_files(folder: str, topic: str = "model") -> Iterator[Finding]:
    """Checks the header of every tensor in every file of a Hugging Face folder.

    Raises:
        UserError: A file is missing, truncated, unreadable, or does not match config.json.
    """
    with HfSource(resolve_model_path(f"{topic}.path", folder) or folder) as source:
        source.check()
        size = sum((source.folder / name).stat().st_size for name in source.files)
        yield ok(topic, f"'{folder}': {len(source.files)} files, {size / GB:.3g} GB, headers complete")


def check_data(config: Config) -> Iterator[Finding]:
    """Checks that the data files exist, are readable and not empty."""
    template, bad = config.data.chat_template, list[str]()
    files = [template] if template else []
    for side in SPLITS:
        for text in getattr(config.data, f"{side}_files"):
            try:
                files += paths_of(text, side)
            except UserError as error:
                bad.append(str(error).rstrip("."))
    for name in files:
        try:
            with Path(name).open("rb") as stream:
                if not stream.read(1):
                    bad.append(f"'{name}' is empty")
        except OSError as error:
            bad.append(f"'{name}': {error.strerror}")
    if bad:
        yield problem("data", "; ".join(bad), "fix data.train_files, data.val_files or data.chat_template")
    elif files:
        yield ok("data", f"{len(files)} file(s) can be read")


def checkpoint_bytes(config: Config, arch: ArchSpec) -> int:
    """Returns the disk space of a run's checkpoints: those kept, the one being written, and a reference."""
    item, parameters = ITEM_BYTES[config.model.dtype], num_parameters(arch)
    adapters = lora.num_parameters(arch, config.actor.lora) if config.actor.lora.rank else 0
    trained = adapters or parameters
    each = _saved_bytes(config, trained)
    algorithm = algorithms.build(config.algorithm, config.rollout)
    if algorithm.needs_values:  # a critic of the actor's size
        critic = adapters_of(config)
        each += _saved_bytes(critic_config(config), lora.num_parameters(arch, critic) if critic.rank else parameters)
    if config.checkpoint.export_hf:
        each += (parameters + adapters) * item
    reference = trained * item if algorithm.needs_reference and config.reference.path is None else 0
    return each * (config.checkpoint.keep_last + config.checkpoint.keep_best + 1) + reference


def _saved_bytes(config: Config, trained: int) -> int:
    """Returns the size of the trained weights and their optimizer state in a checkpoint, bytes."""
    dtype = trained_dtype(config)
    states = optimizer_memory(config, dtype, owned=trained, largest=trained, held=trained)
    return trained * ITEM_BYTES[dtype] + states.saved
