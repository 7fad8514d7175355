"""What a config names: the model folder, data, the reference, and how much its checkpoints take.

Owns opening these before a job does. Rules between fields are `trainer/validation/`'s, and are asked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mrl.algorithms import base as algorithms
from mrl.checkpoint.formats.hf import HfSource
from mrl.checkpoint.formats.hub import local_folder
from mrl.commands.doctor.finding import Finding, ok, problem
from mrl.commands.plan.memory import num_parameters
from mrl.commands.plan.optimizer_memory import optimizer_memory
from mrl.config.config import Config
from mrl.models.base import ArchSpec
from mrl.resharding.copy_op import ITEM_BYTES
from mrl.trainer.resolve import resolve
from mrl.trainer.validation.world_size import world_size

GB = 1e9


def check_config(config: Config, file: str, started: int) -> Iterator[Finding]:
    """The model's structure and tokenizer, the layout, and all rules between fields, for the ranks of `world_size`.

    Args:
        config: Of the run.
        file: Where it stands.
        started: Ranks of the job that this process is one of.

    Raises:
        UserError: A mistake in the config or the model folder.
    """
    size = world_size(config, file, None, started=started)
    found = resolve(config, size.ranks)
    grid = found.grid
    layout = f"fits {grid.world_size} ranks ({size.why}): "
    layout += f"tp {grid.tp} x cp {grid.cp} x dp {grid.dp} x pp {grid.pp}"
    layout += f", and {grid.rollout_ranks} that only sample" if grid.has_roles else ""
    model = config.model.path or config.model.preset
    yield ok("config", f"{model}: {num_parameters(found.arch) / GB:.3g} x 10^9 parameters; {layout}")


def models_of(config: Config) -> Iterator[tuple[str, str]]:
    """What is said of each model folder that the config names, and the folder."""
    for topic, path in (
        ("model", config.model.path),
        ("reference", config.reference.path),
        ("critic", config.critic.path),
        ("reward model", config.reward.model.path),
    ):
        if path is not None:
            yield topic, path


def check_model_files(folder: str, topic: str = "model") -> Iterator[Finding]:
    """Every tensor's header in every file of a Hugging Face folder.

    Raises:
        UserError: A file is missing, cut short, not readable, or does not belong to config.json.
    """
    with HfSource(local_folder(f"{topic}.path", folder) or folder) as source:
        source.check()
        size = sum((source.folder / name).stat().st_size for name in source.files)
        yield ok(topic, f"'{folder}': {len(source.files)} files, {size / GB:.3g} GB, headers whole")


def check_data(config: Config) -> Iterator[Finding]:
    """The files of prompts: there, readable, not empty."""
    files = [*config.data.train_files, *config.data.val_files]
    files += [config.data.chat_template] if config.data.chat_template else []
    bad = []
    for name in files:
        try:
            with Path(name).open("rb") as stream:
                if not stream.read(1):
                    bad.append(f"'{name}' is empty")
        except OSError as error:
            bad.append(f"'{name}': {error.strerror}")
    if bad:
        yield problem("data", "; ".join(bad), "mend data.train_files, data.val_files or data.chat_template")
    elif files:
        yield ok("data", f"{len(files)} file(s) can be read")


def checkpoint_bytes(config: Config, arch: ArchSpec) -> int:
    """What the checkpoints of a run take on the disk: those kept, the one being written, a reference."""
    dtype = ITEM_BYTES[config.model.dtype]
    parameters = num_parameters(arch)
    optimizer = optimizer_memory(config, owned=parameters, largest=parameters, held=parameters)
    each = parameters * dtype + optimizer.saved
    algorithm = algorithms.build(config.algorithm, config.rollout)
    if algorithm.needs_values:  # a critic of the actor's size
        each *= 2
    if config.checkpoint.export_hf:
        each += parameters * dtype
    reference = parameters * dtype if algorithm.needs_reference and config.reference.path is None else 0
    return each * (config.checkpoint.keep_last + config.checkpoint.keep_best + 1) + reference
