"""Refuses a run that cannot work, before any process group exists: ranges, rules between fields, rules with the model.

Owns every rule that needs no tensor and no rank but this one. What a section alone decides stays with its owner: the
algorithm's own fields in `algorithms/base.py`, rows of data in `data/`, values' types in `config.py`. All broken rules
are told at once. It imports no torch.

    check_config(config, world_size)                   # needs no model
    check(config, arch, world_size, vocab_size, ...)   # the same rules, and those with model, tokenizer and algorithm
"""

from __future__ import annotations

import math
import os.path
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from mrl.config import Config
from mrl.data.steps import optimizer_steps
from mrl.engines.trtllm import fields as trtllm
from mrl.errors import UserError
from mrl.grid import Grid
from mrl.models.base import ArchSpec
from mrl.preflight.engine import engine_rules
from mrl.preflight.experts import expert_rules
from mrl.preflight.idle import idle_rules
from mrl.schema import own_code, registry
from mrl.weights.megatron import chunk_layers
from mrl.weights.shards import TensorShard, check_divides

MAX_RANKS = 1 << 17
"""More than any cluster has; what a layout costs is computed rank by rank."""

MAX_LAYERS, MAX_EXPERTS = 4096, 65536
"""Of a model: each of its tensors is placed by itself."""

RANGES = {
    "run.seed": "[0, 4294967296)",
    "run.num_threads": "[0, 4096]",
    "run.collective_timeout_s": "[0.001, 31536000]",
    "run.heartbeat_timeout_s": "[0.001, 31536000]",
    "run.max_time_s": "[0, 31536000]",
    "run.stop_timeout_s": "[0.001, 31536000]",
    "run.term_timeout_s": "[0.001, 31536000]",
    "train.num_steps": "[0, 1e9]",
    "train.batch_size": "[1, 1048576]",
    "train.minibatch_size": "[1, 1048576]",
    "train.num_epochs": "(0, 1e9]",
    "train.eval_interval": "[0, 1e9]",
    "train.warm_start.num_steps": "[0, 1e9]",
    "train.warm_start.batch_size": "[1, 1048576]",
    "train.warm_start.lr": "(0, 100]",
    "train.warm_start.lr_warmup_steps": "[0, 1e9]",
    "parallel.tensor_model_parallel_size": "[1, 131072]",
    "parallel.pipeline_model_parallel_size": "[1, 131072]",
    "parallel.virtual_pipeline_model_parallel_size": "[1, 131072]",
    "parallel.context_parallel_size": "[1, 131072]",
    "parallel.expert_model_parallel_size": "[1, 131072]",
    "parallel.expert_tensor_parallel_size": "[1, 131072]",
    "parallel.num_layers_in_first_pipeline_stage": "[1, 131072]",
    "parallel.num_layers_in_last_pipeline_stage": "[1, 131072]",
    "actor.ppo_epochs": "[1, 1e6]",
    "actor.lr": "[0, 100]",
    "actor.min_lr": "[0, 100]",
    "actor.lr_warmup_steps": "[0, 1e9]",
    "actor.weight_decay": "[0, 1000]",
    "actor.adam_beta1": "[0, 1)",
    "actor.adam_beta2": "[0, 1)",
    "actor.adam_eps": "[1e-30, 1]",
    "actor.clip_grad": "[0, 1e9]",
    "actor.max_tokens_per_microbatch": "[1, 1e9]",
    "actor.logprob_chunk_tokens": "[1, 1e9]",
    "actor.moe_aux_loss_coeff": "[0, 1000]",
    "actor.moe_z_loss_coeff": "[0, 1000]",
    "reference.update_interval": "[0, 1e9]",
    "rollout.n": "[1, 65536]",
    "rollout.temperature": "[1e-6, 1e6]",
    "rollout.top_k": "-1 or [1, 1e9]",
    "rollout.top_p": "(0, 1]",
    "rollout.min_p": "[0, 1)",
    "rollout.repetition_penalty": "(0, 1000]",
    "rollout.prompt_length": "[1, 16777216]",
    "rollout.response_length": "[1, 16777216]",
    "rollout.max_model_len": "[2, 33554432]",
    "rollout.tensor_model_parallel_size": "[1, 131072]",
    "rollout.pipeline_model_parallel_size": "[1, 131072]",
    "rollout.expert_parallel_size": "[1, 131072]",
    "rollout.moe_tensor_parallel_size": "[1, 131072]",
    "rollout.max_num_seqs": "[1, 1048576]",
    "rollout.max_num_batched_tokens": "[1, 1e9]",
    "rollout.gpu_memory_utilization": "[1e-9, 1)",
    "rollout.val_kwargs.n": "[1, 65536]",
    "rollout.val_kwargs.temperature": "0 or [1e-6, 1e6]",
    "rollout.val_kwargs.top_k": "-1 or [1, 1e9]",
    "rollout.val_kwargs.top_p": "(0, 1]",
    "rollout.val_kwargs.min_p": "[0, 1)",
    "rollout.checkpoint_engine.update_weights_bucket_megabytes": "[1, 1048576]",
    "reward.time_limit_s": "[0.001, 31536000]",
    "reward.num_workers": "[1, 1024]",
    "reward.memory_limit_mb": "0 or [256, 1e9]",
    "reward.error_value": "[-1e9, 1e9]",
    "reward.max_failed_frac": "[0, 1]",
    "checkpoint.interval": "[0, 1e9]",
    "checkpoint.keep_last": "[1, 1e9]",
    "checkpoint.keep_best": "[0, 1e9]",
    "observe.num_samples": "[0, 1e9]",
}
"""Values of every number outside `algorithm`: intervals, or single values. Upper ends are beyond any sensible use: a
slip is told before processes start, memory is taken or a number overflows."""

WEIGHTS = "[-1e9, 1e9]"
"""Of a reward function."""

MAX_SEQUENCES = 1 << 24
"""Of a step: prompts x samples."""

FIXED = {
    "rollout.repetition_penalty": (1.0, "the log-probabilities that train would not be those that sampled"),
    "rollout.calculate_log_probs": (True, "log-probabilities captured at sampling time are pi_old"),
}
"""Fields that take one value in this version, and why."""

Rule = Callable[[Config, Grid], Iterator[str]]


def check_config(config: Config, world_size: int, *, supervised: bool = False) -> None:
    """All rules that need no model.

    Args:
        config: What was asked for.
        world_size: Ranks of the job.
        supervised: The algorithm samples nothing.

    Raises:
        UserError: Each broken rule, with the keys and what to do.
    """
    _raise([*_ranges(config), *_fixed(config)])
    if world_size > MAX_RANKS:
        raise UserError(f"{world_size} ranks are more than the {MAX_RANKS} that mrl counts with.")
    names = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    sizes = {name: getattr(config.parallel, name) for name in names}
    num_ranks = math.prod(sizes.values())
    if world_size % num_ranks:
        product = " x ".join(f"parallel.{name}={size}" for name, size in sizes.items() if size > 1)
        equals = f" = {num_ranks}" if " x " in product else ""
        raise UserError(
            f"{product}{equals} does not divide the {world_size} rank(s) of this job. {_how_many_ranks(config)}"
        )
    grid = grid_of(config, world_size)
    rules: tuple[Rule, ...] = (_parallel, _steps, _lengths, _sampling, _model, _data, _evaluation)
    broken = [message for rule in rules for message in rule(config, grid)]
    _raise([*broken, *_few_sequences(config, grid, supervised), *idle_rules(config, grid, supervised=supervised)])


def check(
    config: Config, arch: ArchSpec, world_size: int, tokenizer_vocab_size: int, *, supervised: bool = False
) -> None:
    """All rules, those with the model and its tokenizer too.

    Args:
        config: What was asked for.
        arch: The model's structure.
        world_size: Ranks of the job.
        tokenizer_vocab_size: One more than the largest id that the tokenizer gives.
        supervised: The algorithm samples nothing.

    Raises:
        UserError: Each broken rule, with the keys and what to do.
    """
    check_config(config, world_size, supervised=supervised)
    grid = grid_of(config, world_size)
    num_experts = arch.moe.num_experts if arch.moe else 0
    if arch.num_layers > MAX_LAYERS or num_experts > MAX_EXPERTS:
        raise UserError(
            f"the model has {arch.num_layers} layers and {num_experts} experts; mrl counts with at most {MAX_LAYERS} "
            f"layers and {MAX_EXPERTS} experts."
        )
    broken = [
        *_fit(config, arch, grid),
        *expert_rules(config, arch, grid, supervised=supervised),
        *engine_rules(config, arch),
    ]
    if tokenizer_vocab_size > arch.vocab_size:
        broken.append(
            f"the tokenizer gives ids up to {tokenizer_vocab_size - 1}, the model has embeddings for {arch.vocab_size} "
            "tokens. Set model.tokenizer to the model's own."
        )
    _raise(broken)


def grid_of(config: Config, world_size: int) -> Grid:
    """The parallel layout that the config asks for."""
    return Grid(
        world_size=world_size,
        tp=config.parallel.tensor_model_parallel_size,
        pp=config.parallel.pipeline_model_parallel_size,
        vpp=config.parallel.virtual_pipeline_model_parallel_size or 1,
        cp=config.parallel.context_parallel_size,
        ep=config.parallel.expert_model_parallel_size,
        etp=config.parallel.expert_tensor_parallel_size,
        first_stage_layers=config.parallel.num_layers_in_first_pipeline_stage,
        last_stage_layers=config.parallel.num_layers_in_last_pipeline_stage,
        rollout_tp=config.rollout.tensor_model_parallel_size,
        rollout_ep=config.rollout.expert_parallel_size,
        rollout_pp=config.rollout.pipeline_model_parallel_size,
    )


def max_model_len(config: Config) -> int:
    """Longest sequence of a run, prompt and response, tokens."""
    rollout = config.rollout
    return rollout.max_model_len or rollout.prompt_length + rollout.response_length


def _raise(broken: list[str]) -> None:
    if len(broken) == 1:
        raise UserError(broken[0])
    if broken:
        raise UserError(f"the config breaks {len(broken)} rules:" + "".join(f"\n  - {message}" for message in broken))


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _how_many_ranks(config: Config) -> str:
    """How to start as many ranks as the layout needs, to look at it without them, and to do with one."""
    parallel, rollout = config.parallel, config.rollout
    num_ranks = grid_of(config, 1).fewest_ranks
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_parallel_size")
    defaults = {f"parallel.{item.name}": item.default for item in fields(parallel)}
    defaults |= {f"rollout.{item.name}": item.default for item in fields(rollout) if item.name in names}
    changed = {key: value for key, value in defaults.items() if _value(config, key) != value}
    alone = " ".join(f"{key}={'null' if value is None else str(value).lower()}" for key, value in changed.items())
    return (
        f"Start a multiple of {num_ranks} ranks: torchrun --nproc-per-node {num_ranks} -m mrl ... "
        f"(launch/torchrun.sh); only look at it: mrl train ... --dry-run --world-size {num_ranks}; "
        f"or do with one process: {alone}"
    )


def _ranges(config: Config) -> Iterator[str]:
    for key, allowed in RANGES.items():
        value = _value(config, key)
        if value is not None and not any(_within(value, part) for part in allowed.split(" or ")):
            yield f"{key}={value} is out of range; expected {allowed}."
    for index, function in enumerate(config.reward.functions):
        if not _within(function.weight, WEIGHTS):
            yield f"reward.functions[{index}].weight={function.weight} is out of range; expected {WEIGHTS}."


def _within(value: float, allowed: str) -> bool:
    """Whether a number lies in "[low, high)" or is the one given; not-a-number lies nowhere."""
    if allowed[0] not in "[(":
        return value == float(allowed)
    low, high = (float(bound) for bound in allowed[1:-1].split(","))
    above = low <= value if allowed[0] == "[" else low < value
    return above and (value <= high if allowed[-1] == "]" else value < high)


def _fixed(config: Config) -> Iterator[str]:
    for key, (only, reason) in FIXED.items():
        value = _value(config, key)
        if value != only:
            yield f"{key}={value} is refused; it must be {only}: {reason}."


def _parallel(config: Config, grid: Grid) -> Iterator[str]:
    if grid.vpp > 1 and grid.pp == 1:
        yield (
            f"parallel.virtual_pipeline_model_parallel_size={grid.vpp} needs "
            "parallel.pipeline_model_parallel_size above 1: chunks are interleaved over stages."
        )
    if config.parallel.sequence_parallel and grid.tp == 1:
        yield "parallel.sequence_parallel=true needs parallel.tensor_model_parallel_size above 1."
    stage = grid.world_size // grid.pp
    if grid.ep > 1 and stage % (grid.ep * grid.expert_tp):
        yield (
            f"parallel.expert_model_parallel_size={grid.ep} x parallel.expert_tensor_parallel_size={grid.expert_tp} = "
            f"{grid.ep * grid.expert_tp} does not divide the {stage} rank(s) of a pipeline stage. "
            f"{_how_many_ranks(config)}"
        )
    if grid.rollout_pp > 1 and config.rollout.name != "trtllm_engine":
        yield (
            f"rollout.pipeline_model_parallel_size={grid.rollout_pp} is refused with rollout.name="
            f"{config.rollout.name}: only built TensorRT-LLM engines (rollout.name=trtllm_engine) have a pipeline."
        )
    elif grid.world_size % grid.rollout_size:
        stages = f" x rollout.pipeline_model_parallel_size={grid.rollout_pp}" if grid.rollout_pp > 1 else ""
        yield (
            f"rollout.tensor_model_parallel_size={grid.rollout_tp}{stages} does not divide the {grid.world_size} "
            f"rank(s) of this job: replicas are equal groups of ranks. {_how_many_ranks(config)}"
        )


def _steps(config: Config, grid: Grid) -> Iterator[str]:
    train = config.train
    if train.batch_size * config.rollout.n > MAX_SEQUENCES:
        yield (
            f"train.batch_size={train.batch_size} x rollout.n={config.rollout.n} are more than {MAX_SEQUENCES} "
            "sequences of a step."
        )
    minibatch = train.minibatch_size or train.batch_size
    if train.batch_size % minibatch:
        yield f"train.minibatch_size={minibatch} does not divide train.batch_size={train.batch_size}."
    if train.warm_start.num_steps and train.warm_start.batch_size < grid.dp:
        yield f"train.warm_start.batch_size={train.warm_start.batch_size} is below the data-parallel size {grid.dp}."
    if train.num_steps == 0 and not train.warm_start.num_steps:
        yield "train.num_steps and train.warm_start.num_steps are both 0: there is nothing to do."
    actor = config.actor
    if actor.min_lr > actor.lr:
        yield f"actor.min_lr={actor.min_lr} is above actor.lr={actor.lr}."
    total = optimizer_steps(config)
    if actor.lr_schedule != "constant" and total is not None and 0 < total <= actor.lr_warmup_steps:
        yield (
            f"actor.lr_warmup_steps={actor.lr_warmup_steps} leaves nothing of the run's {total} optimizer steps for "
            f"actor.lr_schedule={actor.lr_schedule}."
        )


def _few_sequences(config: Config, grid: Grid, supervised: bool) -> Iterator[str]:
    prompts = config.train.minibatch_size or config.train.batch_size
    if prompts * (1 if supervised else config.rollout.n) < grid.dp:
        what = (
            f"a batch of {prompts} examples"
            if supervised
            else (f"a minibatch of {prompts} prompts x rollout.n={config.rollout.n} samples")
        )
        raised = "train.batch_size" if supervised else "train.minibatch_size or rollout.n"
        yield (
            f"{what} is smaller than the data-parallel size {grid.dp}: some ranks would never train. Raise {raised}."
        )


def _lengths(config: Config, grid: Grid) -> Iterator[str]:
    rollout = config.rollout
    both = rollout.prompt_length + rollout.response_length
    longest = max_model_len(config)
    if longest < both:
        yield (
            f"rollout.max_model_len={longest} is below rollout.prompt_length={rollout.prompt_length} + "
            f"rollout.response_length={rollout.response_length} = {both}."
        )
    if config.actor.max_tokens_per_microbatch < both:
        yield (
            f"actor.max_tokens_per_microbatch={config.actor.max_tokens_per_microbatch} is below the longest sequence, "
            f"rollout.prompt_length + rollout.response_length = {both}: a sequence is never split."
        )
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < rollout.prompt_length:
        yield (
            f"rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is below rollout.prompt_length="
            f"{rollout.prompt_length} and rollout.enable_chunked_prefill=false: such a prompt could not be read."
        )


def _sampling(config: Config, grid: Grid) -> Iterator[str]:
    rollout, val = config.rollout, config.rollout.val_kwargs
    engines = registry.names("engines")
    if rollout.name not in engines and not own_code.is_own(rollout.name):
        yield (
            f"rollout.name={rollout.name} is no engine of this version; it has {', '.join(engines)}. Or give a path "
            f"{own_code.FORMS}."
        )
    if not rollout.do_sample and rollout.n > 1:
        yield f"rollout.do_sample=false makes rollout.n={rollout.n} equal samples of a prompt. Set rollout.n=1."
    if val.greedy and val.n > 1:
        why = "temperature=0" if val.do_sample else "do_sample=false"
        yield f"rollout.val_kwargs.n={val.n} with {why} scores the same answer {val.n} times."
    yield from trtllm.refusals(rollout)
    if any(not text for text in rollout.stop):
        yield "rollout.stop holds an empty string, which would end every response at once."


def _model(config: Config, grid: Grid) -> Iterator[str]:
    model = config.model
    if (model.path is None) == (model.preset is None):
        came = "neither" if model.path is None else "both"
        yield f"{came} of model.path and model.preset set: give one, a Hugging Face folder or the name of a preset."
    if model.path is not None and not os.path.isdir(model.path):
        yield f"model.path={model.path} is not a folder, nor a name as on the hub. Give a local Hugging Face folder."
    if model.path is None and model.tokenizer is None:
        yield 'a preset has no tokenizer: set model.tokenizer to a folder, or to "char:<characters>".'
    if config.reference.path is not None and not os.path.isdir(config.reference.path):
        yield f"reference.path={config.reference.path} is not a folder. Give a local Hugging Face folder."


def _data(config: Config, grid: Grid) -> Iterator[str]:
    data = config.data
    if data.task is None and not data.train_files:
        yield "there are no prompts: set data.train_files, or data.task."
    if data.task is not None and (data.train_files or data.val_files):
        yield f"data.task={data.task} makes its own rows; data.train_files and data.val_files must be empty."
    for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        for file in files:
            if not os.path.isfile(file):
                yield f"{key}: '{file}' does not exist."
    if data.chat_template is not None and not os.path.isfile(data.chat_template):
        yield f"data.chat_template='{data.chat_template}' does not exist."
    if not config.reward.functions:
        yield "reward.functions is empty: no response would have a reward."


def _evaluation(config: Config, grid: Grid) -> Iterator[str]:
    held_out = config.data.task is not None or bool(config.data.val_files)
    if config.train.eval_interval and not held_out:
        yield f"train.eval_interval={config.train.eval_interval} needs held-out prompts: set data.val_files."
    if config.checkpoint.keep_best and not (held_out and config.train.eval_interval):
        yield (
            f"checkpoint.keep_best={config.checkpoint.keep_best} ranks checkpoints by evaluations: set "
            "train.eval_interval, and data.val_files where there is no data.task."
        )
    if not config.checkpoint.best_metric.startswith(("val/", "val-")):
        yield f"checkpoint.best_metric={config.checkpoint.best_metric} is no evaluation metric, such as val/accuracy."


def _fit(config: Config, arch: ArchSpec, grid: Grid) -> Iterator[str]:
    """Rules between the layout, the lengths and the model."""
    attempts: tuple[Callable[[], object], ...] = (
        lambda: check_divides(arch, TensorShard(grid.tp, 0, "parallel.tensor_model_parallel_size")),
        lambda: check_divides(arch, TensorShard(grid.rollout_tp, 0, "rollout.tensor_model_parallel_size")),
        lambda: chunk_layers(arch, grid),
    )
    for attempt in attempts:
        try:
            attempt()
        except UserError as error:
            yield str(error)
    longest = max_model_len(config)
    if longest > arch.max_position_embeddings:
        yield (
            f"sequences of {longest} tokens (rollout.max_model_len, or rollout.prompt_length + "
            f"rollout.response_length) exceed the model's max_position_embeddings={arch.max_position_embeddings}."
        )
