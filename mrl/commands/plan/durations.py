"""How long the phases of a step take on stated hardware: floating-point operations and bytes over rates.

Owns the predictions and what they assume: every response has its full length, ranks of a kind wait for nobody,
communication hides behind computation except where a line below says otherwise. The parts of the peak rates that are
reached are assumptions of `observability/hardware.py`, not measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mrl.commands.plan.activations import largest_microbatch
from mrl.commands.plan.engine_memory import cache_item_bytes, token_elements
from mrl.commands.plan.engine_weights import weight_bytes
from mrl.commands.plan.recompute import recompute_of
from mrl.config.config import Config
from mrl.models.base import ArchSpec
from mrl.observability.hardware import Hardware
from mrl.observability.metrics import forward_flops
from mrl.parallel_layout import Grid
from mrl.resharding.copy_op import ITEM_BYTES
from mrl.trainer.resolve import Resolved
from mrl.trainer.validation.critic import critic_config


@dataclass(frozen=True)
class Durations:
    """Seconds of one step, the refit aside.

    Attributes:
        prefill: Of the rollout: reading the prompts.
        decode: Of the rollout: sampling.
        decode_steps: Passes of the engine over its running sequences.
        bound_by: What a decode pass waits for: "weights", "KV cache", "FLOPs" or "all-reduces".
        score: Log-probabilities by the reference and, where asked for, by the actor; values by a critic; all teachers,
            as if each had all prompts.
        update: All optimizer steps, a critic's too.
        bubble_frac: Part of `update` in which a stage waits for another.
    """

    prefill: float
    decode: float
    decode_steps: int
    bound_by: str
    score: float
    update: float
    bubble_frac: float


def predict_durations(found: Resolved, hardware: Hardware, kv_rows: int) -> Durations:
    """Of a step of a run.

    Args:
        found: The run.
        hardware: Rates of its GPUs and links.
        kv_rows: Sequences that a replica decodes at a time.
    """
    config, arch, grid = found.config, found.arch, found.grid
    passes = float(config.actor.ppo_epochs)
    prefill, decode, steps, bound_by = 0.0, 0.0, 0, ""
    scorings = int(found.algorithm.needs_reference)
    if found.algorithm.supervised:
        passes = 1.0
    else:
        scorings += int(found.scores_proximal)
        scorings += config.actor.ppo_epochs * int(found.algorithm.needs_current)
        prefill, decode, steps, bound_by = _rollout(config, arch, grid, hardware, kv_rows)
    rate = len(grid.trainers) * hardware.bf16_flops * hardware.train_flops_frac
    forward = _trained_flops(found, arch) / rate
    bubble = _bubble(found)
    score, update = scorings * forward, passes * (3 + recompute_of(config).forwards(arch)) * forward
    score += sum(_trained_flops(found, teacher) / rate for teacher in found.teachers)
    if found.reward is not None and not found.algorithm.supervised:
        score += _trained_flops(found, found.reward) / rate
    if found.critic is not None:
        of_critic, critic = critic_config(config), found.critic
        forward = _trained_flops(found, critic) / rate
        score += forward
        update += of_critic.actor.ppo_epochs * (3 + recompute_of(of_critic).forwards(critic)) * forward
    return Durations(
        prefill=prefill,
        decode=decode,
        decode_steps=steps,
        bound_by=bound_by,
        score=score / (1 - bubble),
        update=update / (1 - bubble),
        bubble_frac=bubble,
    )


def _trained_flops(found: Resolved, arch: ArchSpec) -> float:
    """Of one forward pass of a model over all samples of a step, prompts once for those that share a microbatch."""
    rollout, count = found.config.rollout, found.config.train.batch_size * found.algorithm.num_samples
    together = largest_microbatch(found.config, found.grid, learns_from=found.algorithm.learns_from).together
    prompt, whole = (forward_flops(arch, [length]) for length in (rollout.prompt_length, rollout.longest))
    return count * (whole - prompt) + math.ceil(count / together) * prompt


@dataclass(frozen=True)
class StepTime:
    """A step as a whole, and what each kind of rank does in it; seconds.

    Attributes:
        refit: Of all ranks.
        rollouts: Of the ranks that sample.
        training: Of the ranks that train: scoring and updates.
        step: From one step to the next.
        idle_trainers: Part of the step in which ranks that train wait for the others; 0 where all do both.
        idle_samplers: The same of ranks that sample.
    """

    refit: float
    rollouts: float
    training: float
    step: float
    idle_trainers: float
    idle_samplers: float


def step_time(times: Durations, refit_s: float, *, has_roles: bool, overlaps: bool) -> StepTime:
    """Of a run.

    Args:
        times: Of its phases.
        refit_s: Of a refit, in which nobody samples or trains.
        has_roles: Some ranks train and the others sample.
        overlaps: They do so at the same time.
    """
    rollouts, training = times.prefill + times.decode, times.score + times.update
    step = refit_s + (max(rollouts, training) if has_roles and overlaps else rollouts + training)
    idle = [(step - refit_s - own) / step if has_roles else 0.0 for own in (training, rollouts)]
    return StepTime(refit_s, rollouts, training, step, *idle)


def _bubble(found: Resolved) -> float:
    """Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2: (p - 1) / (v m) of the ideal time."""
    grid = found.grid
    count = largest_microbatch(found.config, grid, learns_from=found.algorithm.learns_from).count
    idle = (grid.pp - 1) / (grid.vpp * count)
    return idle / (1 + idle)


def _rollout(
    config: Config, arch: ArchSpec, grid: Grid, hardware: Hardware, kv_rows: int
) -> tuple[float, float, int, str]:
    """(prefill seconds, decode seconds, decode passes, what they wait for) of the replica with most prompts."""
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
    times = _decode_pass(config, arch, grid, hardware, rows)
    links = times.pop("all-reduces")
    bound_by = max(times, key=lambda name: times[name])
    memory = times["weights"] + times["KV cache"]  # one after the other, beside the products
    each = max(memory, times["FLOPs"]) + links
    return prefill, steps * each, steps, "all-reduces" if links > max(memory, times["FLOPs"]) else bound_by


def _decode_pass(config: Config, arch: ArchSpec, grid: Grid, hardware: Hardware, rows: int) -> dict[str, float]:
    """Seconds of each thing that a pass over `rows` sequences does, by name."""
    rollout = config.rollout
    size = ITEM_BYTES[rollout.dtype or config.model.dtype]
    read = replace(config, rollout=replace(rollout, quantization=None))  # products are of what FP8 stands for
    weights = weight_bytes(read, arch, grid) - _unread_bytes(arch, grid, rows, size)
    mean_len = rollout.prompt_length + rollout.response_length / 2
    cache = rows * mean_len * token_elements(arch, grid.rollout_tp) * cache_item_bytes(config)
    flops = rows * (forward_flops(arch, [1]) + 4 * arch.num_layers * arch.num_heads * arch.head_dim * mean_len)
    per_node, tp = hardware.gpus_per_node, grid.rollout_tp
    inside = all(first // per_node == (first + tp - 1) // per_node for first in grid.samplers[::tp])
    link = hardware.intra_node_bytes_per_s if inside else hardware.inter_node_bytes_per_s
    others = 2 * (grid.rollout_tp - 1) / grid.rollout_tp  # a ring: each byte is sent and received so many times
    reduced = 2 * arch.num_layers * rows * arch.hidden_size * size
    bandwidth = hardware.memory_bytes_per_s * hardware.decode_frac
    return {
        "weights": weights / bandwidth,
        "KV cache": cache / bandwidth,
        "FLOPs": flops / (grid.rollout_tp * hardware.bf16_flops * hardware.decode_frac),
        "all-reduces": others * reduced / link,
    }


def _unread_bytes(arch: ArchSpec, grid: Grid, rows: int, size: int) -> float:
    """The embedding, which is looked up, and experts that no token of a pass goes to, on average."""
    unread = 0.0
    if not arch.tie_word_embeddings:
        unread += arch.vocab_size * arch.hidden_size / grid.rollout_tp
    if arch.moe is not None:
        chance = (1 - arch.moe.top_k / arch.moe.num_experts) ** rows
        experts = arch.moe.num_experts * 3 * arch.moe.intermediate_size * arch.hidden_size / grid.rollout_tp
        unread += chance * arch.num_layers * experts
    return unread * size
