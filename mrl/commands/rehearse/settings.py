"""Reduces a config to a small model and layout: every feature stays on, every amount becomes small.

It also chooses the second layout, at which a rehearsal resumes. A field that is not mentioned here keeps its value, so
that new features are rehearsed without a change here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mrl.commands.rehearse.engine import RehearsalEngine
from mrl.commands.rehearse.model import shrunk_heads, shrunk_windows
from mrl.config.config import (
    TOP_K,
    CheckpointEngineConfig,
    Config,
    CriticConfig,
    DataConfig,
    DistillationConfig,
    LearnsFrom,
    LoraConfig,
    ModelConfig,
    ObserveConfig,
    OptimizerConfig,
    ParallelConfig,
    ReferenceConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
    TrainConfig,
)
from mrl.errors import UserError
from mrl.models._keys import DECODER_KEYS, WINDOW_KEYS
from mrl.models._positions import is_longrope
from mrl.models._quantization import QUANTIZED
from mrl.models.base import ArchSpec
from mrl.models.hf_config import family_of
from mrl.models.presets import PRESETS
from mrl.parallel_layout import ParallelLayout
from mrl.trainer.run_length import decay_steps, minibatches_per_step, optimizer_steps, warmup_steps
from mrl.trainer.run_plan import Resolved
from mrl.trainer.validation import validate
from mrl.trainer.validation.critic import critic_config
from mrl.trainer.validation.megatron import without_refused_fields
from mrl.trainer.validation.parallel import build_parallel_layout

SAMPLES = 4
"""Limit of samples per prompt."""
RESPONSE_LENGTH = 8
EPISODE_LENGTH = 160
"""Limit of a conversation after its prompt, tokens."""
TURNS = 3
"""Limit of assistant turns in a conversation."""
TURN_ENDS = (*"13579aeiost",)
"""Additional stop strings of a turn: a random model would otherwise generate up to the limit."""
MAX_PROMPT_LENGTH = 64
NUM_SEQS = 4
CHUNK_TOKENS = 32
ROUNDS = 3
"""Limit of sampling rounds (dynamic sampling)."""
NUM_VAL = 2
"""Number of validation prompts."""
UTILIZATION = 0.05
"""Share of the host's free memory for all engines' KV caches together."""

VARIETY = RewardFunctionConfig(name="regex", weight=0.1, kwargs={"pattern": r"[02468acegikmoqsuwyACEGIKMOQSUWY]\W*$"})
"""Additional reward that a random model gets about half of the time. Without it all samples of a prompt would have the
same reward and the update no gradient."""

_OF_A_LAYER = re.compile(r"(?:.*\.)?layers\.\d+\.")
"""Start of a module's name that selects one layer."""

_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the reduced run.

    Attributes:
        arch: Reduced model.
        grid: Reduced layout.
        prompt_length: Longest prompt that the run will see, tokens.
        engine: Engine of the reduced run.
    """

    arch: ArchSpec
    grid: ParallelLayout
    prompt_length: int
    engine: RehearsalEngine


def shrunk_config(config: Config, plan: Resolved, sizes: Sizes, folder: Path) -> Config:
    """Returns the config of the reduced run with one step.

    Args:
        config: Real config, without the algorithm's defaults filled in.
        plan: Same config, resolved.
        sizes: Sizes of the reduced run.
        folder: Parent of the run folder `run/` and of the reduced models' folders `model/`, `reference/`, `critic/`,
            `reward/` and `teacher0/` ..., which replace the folders that the config names.
    """
    rollout = _rollout(config.rollout, sizes)
    actor = config.actor
    train = _train(config, sizes.grid, rollout)
    longest, rounds = rollout.max_sequence_length, config.algorithm.max_sampling_rounds
    several = config.actor.max_tokens_per_microbatch >= 2 * config.rollout.max_sequence_length
    shrunk = replace(
        config,
        run=replace(
            config.run,
            output_dir=str(folder / "run"),
            resume="auto",
            device="cpu",
            num_threads=1,
            max_time_s=0.0,
            collective_timeout_s=min(config.run.collective_timeout_s, 300.0),
        ),
        train=train,
        model=_model(config.model, plan.arch, sizes.arch, folder),
        parallel=_parallel(config.parallel, sizes.grid),
        actor=replace(
            actor,
            ppo_epochs=min(actor.ppo_epochs, 2),
            transformer_impl="auto",
            max_tokens_per_microbatch=longest + (longest // 2 if several else 0),
            logprob_chunk_tokens=min(actor.logprob_chunk_tokens, CHUNK_TOKENS),
            moe_token_dispatcher_type=_dispatcher(actor.moe_token_dispatcher_type),
            lora=_lora(actor.lora),
        ),
        reference=_reference(config, folder),
        critic=_critic(config.critic, folder),
        distillation=_distillation(config.distillation, plan.teachers, plan.arch, sizes.arch, folder),
        rollout=rollout,
        algorithm=replace(
            config.algorithm,
            loss_norm_length=_scaled(config.algorithm.loss_norm_length, rollout, config.rollout),
            max_sampling_rounds=min(rounds, ROUNDS) if plan.config.algorithm.dynamic_sampling else rounds,
            overlong=replace(
                config.algorithm.overlong,
                buffer_length=_scaled(config.algorithm.overlong.buffer_length, rollout, config.rollout) or 0,
            ),
        ),
        reward=_reward(config.reward, folder, samples=not plan.algorithm.supervised),
        data=_data(config, rollout, imitates=plan.algorithm.supervised or config.train.warm_start.num_steps > 0),
        checkpoint=replace(config.checkpoint, interval=min(config.checkpoint.interval, 1)),
        observe=_observe(config.observe),
    )
    return with_steps(shrunk, 1)


def _observe(observe: ObserveConfig) -> ObserveConfig:
    few = min(observe.num_samples, 2)
    without_wandb = replace(observe, wandb_project=None, wandb_name=None, wandb_group=None, wandb_tags=[])
    return replace(without_wandb, console="plain", num_samples=few)


def _lora(lora: LoraConfig) -> LoraConfig:
    """Returns new adapters in all layers of the reduced model, of the same rank."""
    return replace(
        lora,
        adapter_path=None,
        target_modules=list(dict.fromkeys(_OF_A_LAYER.sub("", name) for name in lora.target_modules)),
        exclude_modules=[name for name in lora.exclude_modules if not _OF_A_LAYER.match(name)],
    )


def _reference(config: Config, folder: Path) -> ReferenceConfig:
    """Returns the reduced reference: with adapters the reduced model, as there are none to read."""
    own, adapted = config.reference, config.actor.lora.rank > 0
    absent = own.path is None or (adapted and config.model.path is None)
    path = None if absent else str(folder / ("model" if adapted else "reference"))
    return replace(own, path=path, update_interval=min(own.update_interval, 1))


def _critic(critic: CriticConfig, folder: Path) -> CriticConfig:
    return replace(
        critic,
        path=None if critic.path is None else str(folder / "critic"),
        ppo_epochs=None if critic.ppo_epochs is None else min(critic.ppo_epochs, 2),
    )


def _distillation(
    distilled: DistillationConfig, found: Sequence[ArchSpec], arch: ArchSpec, small: ArchSpec, folder: Path
) -> DistillationConfig:
    loss = distilled.distillation_loss
    teachers = [
        replace(teacher, overrides={**teacher.overrides, **_sizes_of(teacher.preset, small_teacher(own, arch, small))})
        if teacher.preset is not None
        else replace(teacher, model_path=str(folder / f"teacher{index}"))
        for index, (teacher, own) in enumerate(zip(distilled.teacher_models, found, strict=False))
    ]
    topk = min(loss.topk, small.vocab_size) if loss.loss_mode == TOP_K else loss.topk
    return replace(distilled, teacher_models=teachers, distillation_loss=replace(loss, topk=topk))


def small_teacher(teacher: ArchSpec, student: ArchSpec, small: ArchSpec) -> ArchSpec:
    """Returns the reduced teacher: `small` if it equals the student, else its family at `small`'s sizes, but wider."""
    if teacher == student:
        return small
    sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "vocab_size", "moe")
    own = {name: getattr(small, name) for name in sizes}
    own["linear_attention"] = None if teacher.linear_attention is None else small.linear_attention
    own |= shrunk_windows(teacher, small.num_layers)
    own["intermediate_size"] = 2 * small.intermediate_size
    return replace(shrunk_heads(teacher, small.head_dim), **own)


def _dispatcher(name: Literal["alltoall", "allgather", "flex"]) -> Literal["alltoall", "allgather"]:
    return "alltoall" if name == "flex" else name


def with_steps(config: Config, num_steps: int) -> Config:
    """Returns the config with `num_steps` steps and warm-ups that fit into them."""
    alone = min(config.train.critic_warmup, num_steps - 1)
    train = replace(config.train, num_steps=num_steps, num_epochs=None, critic_warmup=alone)
    changed = replace(config, train=train)
    totals = [optimizer_steps(one) or 1 for one in (changed, critic_config(changed))]
    return replace(
        changed,
        actor=replace(config.actor, **_warmup(config.actor, totals[0])),
        critic=replace(config.critic, **_warmup(config.critic, totals[1])),
    )


def _warmup(rates: OptimizerConfig, total: int) -> dict[str, Any]:
    """Returns the fields of a warm-up that leaves room for the schedule in `total` optimizer steps."""
    most = total - (decay_steps(rates, total) if rates.lr_schedule == "wsd" else 1)
    if warmup_steps(rates, total) <= most and not rates.lr_warmup_steps:
        return {}
    return {"lr_warmup_steps": min(rates.lr_warmup_steps, most), "lr_warmup_frac": 0.0}


def other_layout(
    config: Config, arch: ArchSpec, reduced: ParallelLayout, tokenizer_size: int, *, learns_from: LearnsFrom
) -> tuple[Config, int]:
    """Returns the reduced config at another layout of at most two ranks, and its number of ranks.

    Args:
        config: Config of the reduced run.
        arch: Architecture of the reduced model.
        reduced: Parallel layout of the reduced run.
        tokenizer_size: Number of token ids of the tokenizer.
        learns_from: Data that the algorithm learns from.
    """
    for parallel, world_size, own in _other_layouts(config, arch, reduced):
        for rollout_tp in (2, 1) if reduced.rollout_tp == 1 else (1,):
            changed = replace(
                config,
                parallel=parallel,
                rollout=replace(
                    _with_ranks(config.rollout, own),
                    tensor_model_parallel_size=rollout_tp,
                    expert_parallel_size=1,
                    moe_tensor_parallel_size=None,
                ),
            )
            changed, _ = without_refused_fields(changed, arch, build_parallel_layout(changed, world_size))
            try:
                validate.check(changed, arch, world_size, tokenizer_size, learns_from=learns_from)
            except UserError:
                continue
            return changed, world_size
    raise RuntimeError(f"the reduced model has no valid layout other than {reduced} (a bug)")


def _other_layouts(
    config: Config, arch: ArchSpec, reduced: ParallelLayout
) -> Iterator[tuple[ParallelConfig, int, int]]:
    """Yields (parallel sizes, number of ranks, how many of them only sample)."""
    if reduced.has_separate_rollout and reduced.world_size > 2:
        yield ParallelConfig(), 2, 1
    if arch.moe is not None and reduced.ep == 1:
        yield ParallelConfig(expert_model_parallel_size=2), 2, 0
    if reduced.pp == 1:
        yield ParallelConfig(pipeline_model_parallel_size=2), 2, 0
    if reduced.tp == 1:
        yield ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=arch.moe is not None), 2, 0
    yield ParallelConfig(), 2 if reduced.world_size != 2 or reduced.dp != 2 else 1, 0
    yield ParallelConfig(), 1, 0


def _train(config: Config, grid: ParallelLayout, rollout: RolloutConfig) -> TrainConfig:
    """Returns two minibatches if there are several, two samples per data-parallel rank and one prompt per replica."""
    train, warm = config.train, config.train.warm_start
    minibatches = min(2, minibatches_per_step(config))
    minibatch = max(2, math.ceil(2 * grid.dp / rollout.n), math.ceil(grid.num_replicas / minibatches))
    return replace(
        train,
        batch_size=minibatches * minibatch,
        minibatch_size=None if train.minibatch_size is None else minibatch,
        eval_interval=min(train.eval_interval, 1),
        warm_start=replace(
            warm,
            num_steps=min(warm.num_steps, 1),
            batch_size=min(warm.batch_size, 2 * grid.dp),
            lr_warmup_steps=min(warm.lr_warmup_steps, 1),
        ),
    )


def _parallel(parallel: ParallelConfig, grid: ParallelLayout) -> ParallelConfig:
    return replace(
        parallel,
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=grid.vpp if grid.vpp > 1 else None,
        sequence_parallel=parallel.sequence_parallel and grid.tp > 1,
        context_parallel_size=grid.cp,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.etp,
        num_layers_in_first_pipeline_stage=grid.first_stage_layers,
        num_layers_in_last_pipeline_stage=grid.last_stage_layers,
    )


def _rollout(rollout: RolloutConfig, sizes: Sizes) -> RolloutConfig:
    grid = sizes.grid
    prompt = min(rollout.prompt_length, sizes.prompt_length, MAX_PROMPT_LENGTH)
    response = min(rollout.response_length, EPISODE_LENGTH if rollout.multi_turn.enable else RESPONSE_LENGTH)
    longer = (rollout.max_model_len or 0) > rollout.prompt_length + rollout.response_length
    chunked = rollout.max_num_batched_tokens < rollout.prompt_length
    num_seqs = min(rollout.max_num_seqs, NUM_SEQS)
    # without chunked prefill vLLM requires room for a full sequence
    unchunked = prompt if rollout.enable_chunked_prefill else prompt + response + longer
    if rollout.multi_turn.enable:
        rollout = _episodes(rollout)
    return replace(
        _with_ranks(rollout, grid.rollout_ranks),
        name=sizes.engine.name,
        engine_dir=None,
        engine_kwargs={},
        n=min(rollout.n, SAMPLES),
        prompt_length=prompt,
        response_length=response,
        max_model_len=None if rollout.max_model_len is None else prompt + response + longer,
        tensor_model_parallel_size=grid.rollout_tp,
        pipeline_model_parallel_size=1,
        expert_parallel_size=grid.rollout_ep,
        moe_tensor_parallel_size=None if rollout.moe_tensor_parallel_size is None else grid.rollout_moe_tp,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(num_seqs, prompt // 2 if chunked else unchunked),
        gpu_memory_utilization=min(rollout.gpu_memory_utilization, UTILIZATION),
        val_kwargs=replace(rollout.val_kwargs, n=min(rollout.val_kwargs.n, 2)),
        checkpoint_engine=CheckpointEngineConfig(update_weights_bucket_megabytes=1),
    )


def _with_ranks(rollout: RolloutConfig, count: int) -> RolloutConfig:
    return replace(rollout, num_ranks=count, nnodes=0, n_gpus_per_node=RolloutConfig.n_gpus_per_node)


def _episodes(rollout: RolloutConfig) -> RolloutConfig:
    """Limits turns to a few short ones and uses one environment worker."""
    turns = rollout.multi_turn
    return replace(
        rollout,
        stop=[*rollout.stop, *(end for end in TURN_ENDS if end not in rollout.stop)],
        multi_turn=replace(turns, max_assistant_turns=min(turns.max_assistant_turns or TURNS, TURNS)),
        agent=replace(rollout.agent, num_workers=1),
    )


def _scaled(length: int | None, small: RolloutConfig, full: RolloutConfig) -> int | None:
    """Scales a number of response tokens to the reduced response length; 0 and None stay."""
    return None if length is None else math.ceil(length * small.response_length / full.response_length)


def _reward(reward: RewardConfig, folder: Path, *, samples: bool) -> RewardConfig:
    if reward.model.path is not None:
        reward = replace(reward, model=replace(reward.model, path=str(folder / "reward")))
    return replace(reward, functions=[*reward.functions, VARIETY], num_workers=1) if samples else reward


def _data(config: Config, rollout: RolloutConfig, *, imitates: bool) -> DataConfig:
    """Truncates prompts, and responses of supervised steps, to the lengths of the reduced run."""
    data = config.data
    if rollout.prompt_length < config.rollout.prompt_length:
        data = replace(data, overlong_prompts="truncate_left")
    if imitates and rollout.response_length < config.rollout.response_length:
        data = replace(data, overlong_responses="truncate_right")
    return data


def _model(model: ModelConfig, arch: ArchSpec, small: ArchSpec, folder: Path) -> ModelConfig:
    """Returns the same preset with other sizes, or the folder of the reduced model."""
    if model.path is not None:
        return replace(model, path=str(folder / "model"), tokenizer=model.tokenizer or model.path)
    return replace(model, overrides={**model.overrides, **_sizes_of(model.preset or "", small)})


def _sizes_of(preset: str, small: ArchSpec) -> dict[str, Any]:
    """Returns the overrides of a preset's config.json that make it the reduced model."""
    kept = () if is_longrope(small) else _ROPE  # longrope's lists have the size of a head
    own = family_of(small).keys.read - {*WINDOW_KEYS, *QUANTIZED}  # a preset may leave sizes to their defaults
    layer_types = ("layer_types",) if small.linear_attention is not None else ()
    known = {*DECODER_KEYS, *PRESETS[preset], *own, *layer_types} - {"model_type", "tie_word_embeddings", *kept}
    as_json: dict[str, Any] = family_of(small).arch_to_hf(small)
    return {key: value for key, value in as_json.items() if key in known}
