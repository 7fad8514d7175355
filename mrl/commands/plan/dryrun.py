"""`mrl train CONFIG --dry-run`: describes a run without starting it.

The same checks as in a real run reject the same mistakes. No process group is created, no weight read and no folder
made.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mrl.commands.launch import launch_argv
from mrl.commands.plan.memory import describe_adapters, num_parameters, stage_memory
from mrl.commands.plan.undownloaded import with_notes, with_shapes
from mrl.commands.plan.weight_sync_cost import synced_layouts
from mrl.commands.rehearse.placeholders import hint_at_placeholders
from mrl.config.config import Config, TrainConfig, to_yaml
from mrl.config.megatron_fields.defaults import ddp_defaults, overlaps_gradients, transformer_defaults
from mrl.engines._capabilities import engine_capabilities
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.models.transformer_engine import asked_for, missing_fusions
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.plan import TransferPlan, make_plan
from mrl.trainer.run_plan import CheckedConfig, Resolved, check_run, check_run_folder
from mrl.trainer.validation.critic import critic_config
from mrl.trainer.validation.megatron import changes, forced
from mrl.trainer.validation.world_size import WorldSize

MIB = 1 << 20
MAX_ROWS = 32
"""Number of ranks listed."""


def describe(config: Config, size: WorldSize, *, launcher: str | None = None, placeholders: bool = False) -> str:
    """Returns a summary, the layout of ranks, the cost of a weight sync, and the resolved config.

    Args:
        config: Config, not resolved.
        size: Number of ranks and its origin.
        launcher: Launcher as in `LauncherEnv.launcher`; None: not known yet.
        placeholders: Replace missing files by placeholders, and accept model folders without weights.

    Raises:
        UserError: The run is invalid.
    """
    config, notes = with_shapes(config, placeholders=placeholders)
    try:
        with hint_at_placeholders(config):
            found = check_run(
                config, size.ranks, launcher=launcher, tell=notes.append if notes or placeholders else None
            )
        check_run_folder(config)
    except UserError as error:
        raise with_notes(error, notes) from error
    config, grid = found.config, found.grid
    context = f" x cp {grid.cp}" if grid.cp > 1 else ""
    stages = f" x pp {grid.rollout_pp}" if grid.rollout_pp > 1 else ""
    own = f" + {grid.rollout_ranks} that only sample" if grid.has_separate_rollout else ""
    shown = range(min(grid.world_size, MAX_ROWS))
    lines = [
        f"dry run of {grid.world_size} rank(s) ({size.why}), nothing was started",
        "",
        *(f"{name:<10} {words}" for name, words in _summary(found)),
        *(f"{'note':<10} {note}" for note in notes),
        *(f"{'WARNING':<10} {warning}" for warning in found.warnings),
        "",
        f"# ranks: {grid.world_size} = tp {grid.tp}{context} x dp {grid.dp} x pp {grid.pp}{own}"
        f" (model chunks per stage {grid.vpp}); {grid.num_replicas} rollout replica(s) of tp {grid.rollout_tp}{stages}",
        "rank    tp    dp    pp replica",
        *(_row(grid, rank) for rank in shown),
        *([f"... and {grid.world_size - len(shown)} more"] if len(shown) < grid.world_size else []),
        "",
        *(_refit(config, found.arch, grid) if found.needs_engine else ()),
        *_megatron(found),
        "# config, with every field that the run would use",
        to_yaml(config).rstrip(),
    ]
    return "\n".join(lines)


def _summary(plan: CheckedConfig) -> Iterator[tuple[str, str]]:
    config, arch, grid = plan.config, plan.arch, plan.grid
    model, train, rollout = config.model, config.train, config.rollout
    capabilities = engine_capabilities(rollout.name)
    yield "start", launch_argv(grid.world_size, mpi=capabilities.needs_mpi(rollout))
    yield "engine", capabilities.describe(rollout.name) if plan.needs_engine else "none: nothing is sampled"
    yield (
        "model",
        f"{model.path or model.preset} ({arch.family}): {arch.num_layers} layers, hidden {arch.hidden_size}, "
        f"vocabulary {arch.vocab_size:,}: {num_parameters(arch):,} parameters, {model.dtype}",
    )
    if config.actor.lora.rank:
        yield "adapters", describe_adapters(arch, config.actor.lora)
    yield "data", f"{plan.source.num_rows:,} training rows, {len(plan.validation):,} held-out prompts"
    warm = train.warm_start.num_steps
    yield "steps", f"{_steps(train)} of {config.algorithm.name}" + (f" after {warm} supervised" if warm else "")
    each = config.rollout.max_sequence_length
    supervised = plan.algorithm.supervised
    num_samples = train.batch_size * plan.algorithm.num_samples
    product = {
        "samples": f"prompts x {rollout.n} samples = {num_samples:,} sequences",
        "responses": "examples",
        "pairs": f"pairs = {num_samples:,} sequences",
    }[plan.algorithm.learns_from]
    yield (
        "each step",
        f"{train.batch_size} {product} of at most {each:,} tokens: at most {num_samples * each:,} tokens",
    )
    prompts = train.batch_size if supervised else train.minibatch_size or train.batch_size
    in_minibatch = prompts * (num_samples // train.batch_size)
    per_rank = -(-in_minibatch // grid.dp)
    yield (
        "update",
        f"{train.batch_size // prompts} minibatch(es) of {in_minibatch:,} sequences"
        + (f", {config.actor.ppo_epochs} times" if config.actor.ppo_epochs > 1 and not supervised else "")
        + f"; {per_rank:,} for each of {grid.dp} data-parallel rank(s), in about {_num_microbatches(plan, per_rank)} "
        f"microbatch(es) of {config.actor.max_tokens_per_microbatch:,} tokens if all are of full length",
    )
    yield from _memory(plan)


def _memory(plan: Resolved) -> Iterator[tuple[str, str]]:
    config, arch, grid = plan.config, plan.arch, plan.grid
    fullest = max(stage_memory(config, arch, grid), key=lambda one: one.total)
    fullest = fullest if plan.needs_engine else replace(fullest, engine=0)
    parts = {
        "weights": fullest.weights,
        "gradients": fullest.gradients,
        "optimizer": fullest.optimizer,
        **({"engine's weights": fullest.engine} if plan.needs_engine else {}),
    }
    of_engine = parts.pop("engine's weights") if grid.has_separate_rollout else 0
    which = " that trains" if grid.has_separate_rollout else ""
    yield (
        "memory",
        " + ".join(f"{name} {size / MIB:,.1f}" for name, size in parts.items())
        + f" = {sum(parts.values()) / MIB:,.1f} MiB on the fullest rank{which}, by the shapes of the tensors",
    )
    if grid.has_separate_rollout:
        yield "", f"engine's weights {of_engine / MIB:,.1f} MiB on a rank that samples"
    if plan.critic is not None:
        own = max(stage_memory(critic_config(config), plan.critic, grid), key=lambda one: one.total)
        yield (
            "critic",
            f"weights {own.weights / MIB:,.1f} + gradients {own.gradients / MIB:,.1f} + optimizer "
            f"{own.optimizer / MIB:,.1f} = {own.total / MIB:,.1f} MiB on its fullest rank",
        )
    of_reference = "adapters" if config.actor.lora.rank else "weights"
    more = f", the reference's {of_reference} in host memory" if plan.algorithm.needs_reference else ""
    more += f", the weights of {len(plan.teachers)} teacher(s) in host memory" if plan.teachers else ""
    more += ", the reward model's weights in host memory" if plan.reward is not None else ""
    cache = ", the engine's KV cache" if plan.needs_engine else ""
    yield "", f"not included: activations, logits, buffers of collectives{cache}{more}"


def _megatron(plan: Resolved) -> Iterator[str]:
    """Yields the Megatron fields that `megatron` changes and those that mrl switches on for GPUs."""
    config, moe, te = plan.config, plan.arch.moe is not None, asked_for(plan.config, plan.arch)
    given = config.megatron.transformer
    without = missing_fusions(plan.arch)
    on = [f"transformer.{name}" for name in transformer_defaults(given, te=te, moe=moe, without=without)]
    on += [f"ddp.{name}" for name in ddp_defaults(config.actor, config.megatron, te=te)]
    on += ["ddp.overlap_grad_reduce"] if overlaps_gradients(config.actor, te=te) else []
    yield "# Megatron's own fields"
    for section, name, before, after in changes(config.megatron):
        yield f"megatron.{section}.{name}: {_value(before)} -> {_value(after)}"
    condition = "with TransformerEngine" if te else "without TransformerEngine, as configured"
    yield f"switched on {condition}: {', '.join(on) or 'nothing'}"
    yield from (f"WARNING {warning}" for warning in forced(config, plan.arch, plan.grid))
    yield ""


def _value(value: Any) -> str:
    return json.dumps(value, default=str)


def _steps(train: TrainConfig) -> str:
    epochs = [] if train.num_epochs is None else [f"{train.num_epochs:g} pass(es) over the data"]
    return ", or ".join([*([] if train.num_steps is None else [str(train.num_steps)]), *epochs])


def _num_microbatches(plan: Resolved, num_sequences: int) -> int:
    """Returns the number of full-length microbatches, a multiple of the stages of an interleaved pipeline."""
    together = plan.config.actor.max_tokens_per_microbatch // plan.config.rollout.max_sequence_length
    count = math.ceil(num_sequences / max(1, together))
    multiple = plan.grid.pp if plan.grid.vpp > 1 else 1
    return -(-count // multiple) * multiple


def _refit(config: Config, arch: ArchSpec, grid: ParallelLayout) -> Iterator[str]:
    cost = refit_plan(config, arch, grid)
    bucket_bytes = config.rollout.checkpoint_engine.update_weights_bucket_megabytes * MIB
    yield "# refit, each time the weights change"
    yield f"copied inside ranks    {cost.bytes_local / MIB:.2f} MiB"
    bound = f"lower bound {cost.lower_bound_bytes / MIB:.2f} MiB"
    yield f"sent between ranks     {cost.bytes_moved / MIB:.2f} MiB ({bound})"
    yield f"staging of a rank      {cost.peak_staging_bytes(bucket_bytes) / MIB:.2f} MiB"
    yield ""


def refit_plan(config: Config, arch: ArchSpec, grid: ParallelLayout) -> TransferPlan:
    """Plans the copies of a weight sync between all ranks of a layout, see `synced_layouts`."""
    return make_plan(*synced_layouts(config, arch, grid, te=False))


def _row(grid: ParallelLayout, rank: int) -> str:
    at = grid.coords(rank) if rank in grid.trainers else None
    places = ["-"] * 3 if at is None else [at.tp, at.dp, at.pp]
    replica = grid.replica(rank) if rank in grid.samplers else "-"
    return f"{rank:4d} {places[0]:>5} {places[1]:>5} {places[2]:>5} {replica:>7}"
