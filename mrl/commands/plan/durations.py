"""Predicts the duration of a step's phases on given hardware: FLOPs and bytes divided by rates.

Assumptions: every response has its full length unless expected lengths are given, ranks of a kind do not wait for each
other, and communication overlaps computation except where noted below. The attained fractions of the peak rates are
assumptions of `observability/hardware.py`, not measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mrl.commands.plan.activations import largest_microbatch
from mrl.commands.plan.fit import device_of
from mrl.commands.plan.memory import StageMemory, num_kv_rows
from mrl.commands.plan.published import (
    DECODE,
    PREFILL,
    Published,
    PublishedSync,
    at_peak,
    at_published,
    training,
)
from mrl.commands.plan.recompute import recompute_of
from mrl.commands.plan.response_lengths import ResponseLengths
from mrl.commands.plan.weight_sync_cost import RefitPrediction
from mrl.config.config import Config
from mrl.engines._capabilities import memory_plan
from mrl.engines._memory_plan import token_elements
from mrl.models.base import ArchSpec
from mrl.observability.hardware import Hardware
from mrl.observability.metrics import forward_flops, training_flops
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.copy_op import ITEM_BYTES
from mrl.rollout.async_schedule import RolloutSchedule
from mrl.trainer.run_plan import Resolved
from mrl.trainer.validation.critic import critic_config


@dataclass(frozen=True)
class Durations:
    """Durations of a step's phases without the weight sync, s.

    Attributes:
        prefill: Prefill of the rollout's prompts.
        decode: Decoding of the responses.
        decode_steps: Number of decode passes of the engine.
        bound_by: Bottleneck of a decode pass: "weights", "KV cache", "FLOPs" or "all-reduces".
        score: Log-probabilities by the reference and, if needed, the actor; a critic's values; all teachers, as if each
            scored all prompts.
        update: All optimizer steps, including a critic's.
        bubble_frac: Fraction of `update` that is pipeline bubble.
    """

    prefill: float
    decode: float
    decode_steps: int
    bound_by: str
    score: float
    update: float
    bubble_frac: float


def predict_step(
    plan: Resolved, hardware: Hardware, stages: Sequence[StageMemory], lengths: ResponseLengths | None
) -> Durations:
    """Predicts the durations of a step's phases, with the sequences that the KV cache has room for.

    Args:
        plan: Resolved config of the run.
        hardware: Figures of the cluster.
        stages: Memory of each stage at full lengths.
        lengths: Expected response lengths; None: full lengths.
    """
    rows = num_kv_rows(stages)
    if lengths is not None:
        rows = lengths.decoded_rows(plan, device_of(hardware, plan.grid), rows)
    return predict_durations(plan, hardware, rows, lengths)


def predict_durations(
    plan: Resolved, hardware: Hardware, kv_rows: int, lengths: ResponseLengths | None = None
) -> Durations:
    """Predicts the durations of a step's phases.

    Args:
        plan: Resolved config of the run.
        hardware: Rates of GPUs and links.
        kv_rows: Number of sequences that a replica decodes concurrently.
        lengths: Expected response lengths; None: full lengths.
    """
    if lengths is not None:
        plan = lengths.at_mean(plan)
    config, arch, grid = plan.config, plan.arch, plan.grid
    passes = float(config.actor.ppo_epochs)
    prefill, decode, steps, bound_by = 0.0, 0.0, 0, ""
    scorings = int(plan.algorithm.needs_reference)
    if plan.algorithm.supervised:
        passes = 1.0
    else:
        scorings += int(plan.scores_proximal)
        scorings += config.actor.ppo_epochs * int(plan.algorithm.needs_current)
        prefill, decode, steps, bound_by = _rollout(config, arch, grid, hardware, kv_rows, lengths)
    rate = len(grid.trainers) * hardware.bf16_flops * hardware.train_flops_frac
    forward = _forward_flops(plan, arch) / rate
    bubble = _bubble(plan)
    score, update = scorings * forward, passes * _update_flops(plan, config, arch) / rate
    score += sum(_forward_flops(plan, teacher) / rate for teacher in plan.teachers)
    if plan.reward is not None and not plan.algorithm.supervised:
        score += _forward_flops(plan, plan.reward) / rate
    if plan.critic is not None:
        critic_settings, critic = critic_config(config), plan.critic
        score += _forward_flops(plan, critic) / rate
        update += critic_settings.actor.ppo_epochs * _update_flops(plan, critic_settings, critic) / rate
    return Durations(
        prefill=prefill,
        decode=decode,
        decode_steps=steps,
        bound_by=bound_by,
        score=score / (1 - bubble),
        update=update / (1 - bubble),
        bubble_frac=bubble,
    )


def _forward_flops(plan: Resolved, arch: ArchSpec) -> float:
    """Returns the FLOPs of one forward over a step's samples."""
    return _over_samples(plan, partial(forward_flops, arch))


def _update_flops(plan: Resolved, config: Config, arch: ArchSpec) -> float:
    """Returns the FLOPs of one pass of an update over a step's samples: forward, backward and what is recomputed."""
    trained = _over_samples(plan, partial(training_flops, arch, frozen=config.actor.lora.rank > 0))
    return trained + recompute_of(config).forwards(arch) * _forward_flops(plan, arch)


def _over_samples(plan: Resolved, flops: Callable[[Sequence[int]], float]) -> float:
    """Returns the FLOPs of a step's samples; samples of a microbatch share their prompt's."""
    rollout, count = plan.config.rollout, plan.config.train.batch_size * plan.algorithm.num_samples
    together = largest_microbatch(plan.config, plan.grid, learns_from=plan.algorithm.learns_from).together
    prompt, sequence = (flops([length]) for length in (rollout.prompt_length, rollout.max_sequence_length))
    return count * (sequence - prompt) + math.ceil(count / together) * prompt


@dataclass(frozen=True)
class StepTime:
    """Duration of a step and of each kind of rank's work in it, s.

    Attributes:
        refit: Weight sync, in which all ranks take part.
        rollouts: Work of ranks that sample.
        training: Work of ranks that train: scoring and updates.
        step: Time from one step to the next.
        idle_trainers: Fraction of the step in which training ranks wait; 0 if all ranks do both.
        idle_samplers: Fraction of the step in which sampling ranks wait; 0 if all ranks do both.
    """

    refit: float
    rollouts: float
    training: float
    step: float
    idle_trainers: float
    idle_samplers: float


def step_time(times: Durations, refit_s: float, *, has_roles: bool, overlaps: bool) -> StepTime:
    """Returns the duration of a step.

    Args:
        times: Durations of the phases.
        refit_s: Duration of the weight sync, during which no rank samples or trains, s.
        has_roles: Some ranks only train and others only sample.
        overlaps: They work concurrently.
    """
    rollouts, training = times.prefill + times.decode, times.score + times.update
    step = refit_s + (max(rollouts, training) if has_roles and overlaps else rollouts + training)
    idle = [(step - refit_s - own) / step if has_roles else 0.0 for own in (training, rollouts)]
    return StepTime(refit_s, rollouts, training, step, *idle)


@dataclass(frozen=True)
class PhaseTime:
    """Duration of a phase of a step, s.

    Attributes:
        name: Phase; "total": the step.
        peak: Duration at the peak rates.
        assumed: Duration at the fractions of `Hardware`.
        published: Duration at efficiencies that other systems reached.
        sources: Publications of these efficiencies.
        note: Bottleneck and assumed rates.
    """

    name: str
    peak: float
    assumed: float
    published: float
    sources: tuple[Published | PublishedSync, ...] = ()
    note: str = ""


def phase_times(
    plan: Resolved,
    hardware: Hardware,
    stages: Sequence[StageMemory],
    refit: RefitPrediction,
    lengths: ResponseLengths | None,
) -> list[PhaseTime]:
    """Returns the durations of the phases of a step, and of the step, which is the last entry."""
    moe = plan.arch.moe is not None
    peak, assumed, published = (
        predict_step(plan, each, stages, lengths)
        for each in (at_peak(hardware), hardware, at_published(hardware, moe=moe))
    )
    rate, trained = f"{hardware.bf16_flops / 1e12:.0f} TFLOP/s", (training(moe=moe),)
    phases, sync, published_sync = [], 0.0, 0.0
    if not plan.algorithm.supervised:
        sync, published_sync = refit.seconds, refit.published[refit.closest]
        note = "links and memory at their peak"
        phases += [PhaseTime("refit", sync, sync, published_sync, (refit.closest,), note)]
    if assumed.decode_steps:
        note = (
            f"{assumed.decode_steps:,} passes, bound by {assumed.bound_by}; {hardware.decode_frac:.0%} of memory and "
            "FLOP rate"
        )
        prefill = f"{hardware.prefill_flops_frac:.0%} of {rate}"
        phases += [
            PhaseTime("rollout, prompts", peak.prefill, assumed.prefill, published.prefill, (PREFILL,), prefill),
            PhaseTime("rollout, responses", peak.decode, assumed.decode, published.decode, (DECODE,), note),
        ]
    note = f"{hardware.train_flops_frac:.0%} of {rate}"
    if assumed.score:
        phases += [PhaseTime("score", peak.score, assumed.score, published.score, trained, note)]
    bubble = f", {assumed.bubble_frac:.0%} pipeline bubble" if assumed.bubble_frac else ""
    phases += [PhaseTime("update", peak.update, assumed.update, published.update, trained, note + bubble)]
    has_roles, overlaps = plan.grid.has_separate_rollout, RolloutSchedule.of(plan.config).lead > 0
    totals = [
        step_time(times, seconds, has_roles=has_roles, overlaps=overlaps)
        for times, seconds in ((peak, sync), (assumed, sync), (published, published_sync))
    ]
    note = ""
    if has_roles:
        note = "rollouts and training at the same time; " if overlaps else ""
        note += f"ranks that train wait {totals[1].idle_trainers:.0%} of it, those that sample "
        note += f"{totals[1].idle_samplers:.0%} (assumed)"
    return [*phases, PhaseTime("total", totals[0].step, totals[1].step, totals[2].step, note=note)]


def _bubble(plan: Resolved) -> float:
    """Returns the fraction of pipeline bubble.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2: (p - 1) / (v m) of the ideal time.
    """
    grid = plan.grid
    count = largest_microbatch(plan.config, grid, learns_from=plan.algorithm.learns_from).count
    idle = (grid.pp - 1) / (grid.vpp * count)
    return idle / (1 + idle)


def _rollout(
    config: Config,
    arch: ArchSpec,
    grid: ParallelLayout,
    hardware: Hardware,
    kv_rows: int,
    lengths: ResponseLengths | None,
) -> tuple[float, float, int, str]:
    """Returns (prefill s, decode s, decode passes, bottleneck) of the replica with most prompts.

    With expected lengths, a sequence that ends makes room for the next one, and the passes after the last start are
    those of the longest response; a pass then decodes the average number of sequences.
    """
    rollout = config.rollout
    prompts = math.ceil(config.train.batch_size / grid.num_replicas)
    replica_flops = grid.rollout_tp * hardware.bf16_flops
    reads = prompts if rollout.enable_prefix_caching else prompts * rollout.n
    prefill = forward_flops(arch, [rollout.prompt_length] * reads) / (replica_flops * hardware.prefill_flops_frac)
    if not kv_rows:
        return prefill, 0.0, 0, ""
    sequences = prompts * rollout.n
    rows = min(kv_rows, sequences)
    steps = math.ceil(sequences / rows) * rollout.response_length
    if lengths is not None:
        tokens = sequences * lengths.mean
        steps = max(lengths.longest, math.ceil(tokens / rows))
        rows = math.ceil(tokens / steps)
    times = _decode_pass(config, arch, grid, hardware, rows)
    links = times.pop("all-reduces")
    bound_by = max(times, key=lambda name: times[name])
    memory = times["weights"] + times["KV cache"]  # sequential, and concurrent with the matrix products
    each = max(memory, times["FLOPs"]) + links
    return prefill, steps * each, steps, "all-reduces" if links > max(memory, times["FLOPs"]) else bound_by


def _decode_pass(
    config: Config, arch: ArchSpec, grid: ParallelLayout, hardware: Hardware, rows: int
) -> dict[str, float]:
    """Returns the duration of each part of a decode pass over `rows` sequences, s."""
    rollout = config.rollout
    size = ITEM_BYTES[rollout.dtype or config.model.dtype]
    dequantized = replace(config, rollout=replace(rollout, quantization=None))  # the products use no FP8 weights
    engine = memory_plan(config)
    weights = engine.weight_bytes(dequantized, arch, grid) - _unread_bytes(arch, grid, rows, size)
    mean_len = rollout.prompt_length + rollout.response_length / 2
    cache = rows * mean_len * token_elements(arch, grid.rollout_tp) * engine.cache_item_bytes(config)
    by_cached_token = 2 * len(arch.softmax_layers) * arch.num_heads * _cached_dims(arch)
    flops = rows * (forward_flops(arch, [1]) + by_cached_token * mean_len)
    per_node, tp = hardware.gpus_per_node, grid.rollout_tp
    inside = all(first // per_node == (first + tp - 1) // per_node for first in grid.samplers[::tp])
    link = hardware.intra_node_bytes_per_s if inside else hardware.inter_node_bytes_per_s
    ring = 2 * (grid.rollout_tp - 1) / grid.rollout_tp  # ring all-reduce: sends and receives of each byte
    reduced = 2 * arch.num_layers * rows * arch.hidden_size * size
    bandwidth = hardware.memory_bytes_per_s * hardware.decode_frac
    return {
        "weights": weights / bandwidth,
        "KV cache": cache / bandwidth,
        "FLOPs": flops / (grid.rollout_tp * hardware.bf16_flops * hardware.decode_frac),
        "all-reduces": ring * reduced / link,
    }


def _cached_dims(arch: ArchSpec) -> int:
    """Returns the dimensions of a key and a value in the engine's cache, latent ones where attention is latent."""
    return 2 * arch.head_dim if arch.mla is None else arch.mla.cache_dim + arch.mla.kv_lora_rank


def _unread_bytes(arch: ArchSpec, grid: ParallelLayout, rows: int, size: int) -> float:
    """Returns the bytes of the embedding, which is only looked up, and the expected bytes of experts without tokens."""
    unread = 0.0
    if not arch.tie_word_embeddings:
        unread += arch.vocab_size * arch.hidden_size / grid.rollout_tp
    if arch.moe is not None:
        chance = (1 - arch.moe.top_k / arch.moe.num_experts) ** rows
        experts = arch.moe.num_experts * 3 * arch.moe.intermediate_size * arch.hidden_size / grid.rollout_tp
        unread += chance * len(arch.moe_layers) * experts
    return unread * size
