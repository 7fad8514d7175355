"""Metrics of a step, computed from its sample table and timings under the names of verl's dashboards.

Covers rewards, lengths, groups, evaluation, throughput and model FLOPs utilisation; the loss returns its own metrics,
and `memory_peaks.py` measures memory. All functions are pure.

A sample is correct (`val/accuracy`) when the first function of `reward.functions` gives it more than 0.5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from mrl.config.did_you_mean import did_you_mean
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.observability.hardware import peak_bf16_flops
from mrl.types import EPISODE_ENDS, Rollout, SampleTable

WALL_CLOCK_PREFIXES = ("timing_s/", "timing_per_token_ms/", "perf/")
"""Prefixes of metrics that depend on the clock or the machine."""
CORRECT_ABOVE = 0.5
"""Reward of the first function above which a sample counts as correct."""


def is_wall_clock(name: str) -> bool:
    """Returns whether a metric differs between identical runs: times, rates, memory (`timing_s/`, `perf/`, `..._s`)."""
    return name.startswith(WALL_CLOCK_PREFIXES) or name.endswith("_s")


def outcome_metrics(table: SampleTable, *, rewards_N: Tensor, advantages_N: Tensor) -> dict[str, float]:
    """Returns rewards, lengths and group statistics of one step, over the samples of all ranks.

    Args:
        table: One row per scored sample, at least one; equal on every rank, so that every rank computes the same
            numbers.
        rewards_N: Reward of each sample after shaping (overlong penalty).
        advantages_N: Outcome advantage of each sample.

    Returns:
        `critic/{score,rewards,advantages}/{mean,max,min}` (score: unshaped reward), `prompt_length/*`,
        `response_length/*` with `clip_ratio` (fraction of truncated responses), `reward/<function>/mean` over the
        samples that the function scored, `rollout/token_checksum` (equal for two runs that sampled the same responses,
        in any parallel layout), `group_metrics` of the scores, and with a sampling mask `sampling_mask_metrics`.
    """
    columns = {
        "critic/score": table["reward"],
        "critic/rewards": rewards_N,
        "critic/advantages": advantages_N,
        "prompt_length": table["prompt_len"],
        "response_length": table["response_len"],
    }
    metrics: dict[str, float] = {}
    for name, values in columns.items():
        metrics |= spread(name, values)
    metrics["response_length/clip_ratio"] = table["truncated"].mean().item()
    for name in table.columns:
        if name.startswith("reward/"):
            metrics[f"{name}/mean"] = table[name].nanmean().item()
    metrics["rollout/token_checksum"] = table["token_crc"].sum().item() % 2**32
    kept = sampling_mask_metrics(table) if SampleTable.KEPT[0] in table.columns else {}
    return metrics | kept | group_metrics(table["reward"], table["uid"].long())


def sampling_mask_metrics(table: SampleTable) -> dict[str, float]:
    """Returns statistics of the sampling mask (`top_p`, `top_k`, `min_p`) over all sampled tokens.

    Returns:
        `rollout/kept_mass/{mean,min}` (probability of the kept token ids before renormalisation) and
        `rollout/kept_ids/{mean,max}` (number of kept token ids per position, 4 bytes each in a sample).
    """
    tokens = table["sampled_len"].sum()
    return {
        "rollout/kept_mass/mean": (table["kept_mass"].sum() / tokens).item(),
        "rollout/kept_mass/min": table["kept_mass/min"].min().item(),
        "rollout/kept_ids/mean": (table["kept_ids"].sum() / tokens).item(),
        "rollout/kept_ids/max": table["kept_ids/max"].max().item(),
    }


def scoring_metrics(table: SampleTable) -> dict[str, float]:
    """Returns how many samples failed, have no score, or were scored from a cache.

    Args:
        table: One row per sample, scored or not.

    Returns:
        `reward/failed_frac`, `reward/num_missing` (samples that no other metric counts) and `perf/reward/num_cached`.
    """
    return {
        "reward/failed_frac": table["failed"].mean().item(),
        "reward/num_missing": float(len(table) - len(table.scored)),
        "perf/reward/num_cached": table["cached"].sum().item(),
    }


def group_metrics(rewards_N: Tensor, group_id_N: Tensor) -> dict[str, float]:
    """Returns the learning signal of the groups; a group whose rewards are all equal has no advantage.

    Args:
        rewards_N: Reward of each sample.
        group_id_N: Prompt uid of each sample.

    Returns:
        `group/zero_variance_frac` (fraction of groups with equal rewards), `group/reward_std/mean` (population standard
        deviation) and `group/best/mean` (mean of each group's best reward).
    """
    groups = _groups(rewards_N, group_id_N)
    stds = torch.stack([group.std(correction=0) for group in groups])
    flat = torch.stack([group.max() == group.min() for group in groups])
    best = torch.stack([group.max() for group in groups])
    return {
        "group/zero_variance_frac": flat.double().mean().item(),
        "group/reward_std/mean": stds.mean().item(),
        "group/best/mean": best.mean().item(),
    }


def is_correct(rollout: Rollout) -> bool:
    """Returns whether the first reward function gave more than 0.5; False for a sample whose scoring failed."""
    if rollout.reward_error is not None:
        return False
    first = next(iter(rollout.reward_parts.values()), rollout.reward)
    return first > CORRECT_ABOVE


def evaluation_metrics(table: SampleTable) -> dict[str, float]:
    """Returns held-out results over the samples of all ranks.

    Args:
        table: One row per sample, at least one of them scored; unscored ones only count in `val/num_missing`.

    Returns:
        `val/accuracy`, `val/reward/{mean,max,min}`, `val/response_length/{mean,max,min,clip_ratio}`, `val/num_prompts`,
        `val/num_missing`. With n > 1 samples for every prompt also `val/{accuracy,reward}/best@n` (mean over prompts of
        the best scored sample; for accuracy this is pass@n) and `.../mean@n`. For episodes also `episode_metrics`
        prefixed with `val/`.
    """
    sizes = set(torch.unique(table["uid"], return_counts=True)[1].tolist())
    metrics = {"val/num_missing": scoring_metrics(table)["reward/num_missing"]}
    metrics |= {f"val/{name}": value for name, value in episode_metrics(table).items()}
    table = table.scored
    metrics["val/accuracy"] = table["correct"].mean().item()
    metrics |= spread("val/reward", table["reward"])
    metrics |= spread("val/response_length", table["response_len"])
    metrics["val/response_length/clip_ratio"] = table["truncated"].mean().item()
    group_id_N = table["uid"].long()
    groups = {"val/accuracy": _groups(table["correct"], group_id_N), "val/reward": _groups(table["reward"], group_id_N)}
    metrics["val/num_prompts"] = float(len(groups["val/reward"]))
    if len(sizes) == 1 and (n := sizes.pop()) > 1:
        for name, members in groups.items():
            metrics[f"{name}/mean@{n}"] = torch.stack([group.mean() for group in members]).mean().item()
            metrics[f"{name}/best@{n}"] = torch.stack([group.max() for group in members]).mean().item()
    return metrics


def episode_metrics(table: SampleTable) -> dict[str, float]:
    """Returns statistics of multi-turn episodes over the samples of all ranks; {} where samples are single answers.

    Args:
        table: One row per sample.

    Returns:
        `num_turns/{mean,max,min}` (turns of the policy), `tool_calls/{mean,max,min}`, `tool_calls/unread_frac`
        (fraction of attempted calls that could not be parsed or exceeded the limit), `episode/sampled_frac` (fraction
        of response tokens that the policy sampled) and `episode/<reason>_frac` for each of `EPISODE_ENDS`.
    """
    end_N = table["end"]
    if not len(table) or (end_N < 0).any():
        return {}
    metrics = {**spread("num_turns", table["num_turns"]), **spread("tool_calls", table["tool_calls"])}
    meant = (table["tool_calls"] + table["failed_calls"]).sum().item()
    metrics["tool_calls/unread_frac"] = table["failed_calls"].sum().item() / max(meant, 1.0)
    metrics["episode/sampled_frac"] = (table["sampled_len"].sum() / table["response_len"].sum().clamp(min=1)).item()
    for place, name in enumerate(EPISODE_ENDS):
        metrics[f"episode/{name}_frac"] = (end_N == place).double().mean().item()
    return metrics


def evaluation_names(num_samples: int, *, episodes: bool = False) -> list[str]:
    """Returns the names of the metrics of `evaluation_metrics`.

    Args:
        num_samples: Samples per held-out prompt.
        episodes: True if samples are multi-turn episodes.
    """
    rows_NC = torch.zeros(num_samples, len(SampleTable.FACTS))
    rows_NC[:, SampleTable.FACTS.index("sample_index")] = torch.arange(num_samples)
    rows_NC[:, SampleTable.FACTS.index("end")] = 0 if episodes else -1
    return sorted(evaluation_metrics(SampleTable(SampleTable.FACTS, rows_NC)))


def check_is_given(key: str, metric: str, names: Iterable[str]) -> None:
    """Raises UserError if the metric that a config key names is not among the metrics of an evaluation."""
    given = sorted(names)
    if metric not in given:
        raise UserError(
            f"{key}={metric} is not a metric of this run's evaluations.{did_you_mean(metric, given)} Known: "
            f"{', '.join(given)}."
        )


def combine(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combines the metrics of a step's optimizer steps: extremes of names that end in max or min, else means."""
    names = dict.fromkeys(name for one in stats for name in one)
    values = {name: [one[name] for one in stats if name in one] for name in names}
    return {name: _reduced(name, found) for name, found in values.items()}


def progress_metrics(*, global_step: int, epoch: float) -> dict[str, float]:
    """Returns `training/global_step` (RL steps done) and `training/epoch` (passes over the prompts)."""
    return {"training/global_step": float(global_step), "training/epoch": float(epoch)}


def throughput_metrics(
    timings: Mapping[str, float], *, num_tokens: int, num_response_tokens: int, world_size: int
) -> dict[str, float]:
    """Returns the rates of one step.

    Args:
        timings: `Timers.metrics()` of the step.
        num_tokens: Prompt and response tokens of all samples, over all ranks.
        num_response_tokens: Response tokens of all samples, over all ranks.
        world_size: Number of ranks.

    Returns:
        `perf/total_num_tokens`, `perf/time_per_step` (s) and `perf/throughput` (tokens per second and rank over the
        complete step, as in verl). Where "gen" and "update_actor" were timed, also `perf/gen_tokens_per_s` (response
        tokens, all ranks), `timing_per_token_ms/gen` and `timing_per_token_ms/update_actor`.
    """
    metrics = {"perf/total_num_tokens": float(num_tokens)}
    step_s = timings.get("timing_s/step", 0.0)
    if step_s > 0:
        metrics["perf/time_per_step"] = step_s
        metrics["perf/throughput"] = num_tokens / step_s / world_size
    gen_s = timings.get("timing_s/gen", 0.0)
    if gen_s > 0 and num_response_tokens:
        metrics["perf/gen_tokens_per_s"] = num_response_tokens / gen_s
        metrics["timing_per_token_ms/gen"] = 1000 * gen_s / num_response_tokens
    update_s = timings.get("timing_s/update_actor", 0.0)
    if update_s > 0 and num_tokens:
        metrics["timing_per_token_ms/update_actor"] = 1000 * update_s / num_tokens
    return metrics


def forward_flops(arch: ArchSpec, seq_lens: Sequence[int]) -> float:
    """Returns the FLOPs of one forward pass over sequences, without padding, recompute or sampling.

    A multiply-add counts 2. Per token: 2 x the weights it is multiplied with (q, k, v and output projections, gate, up
    and down projections, and the output layer; the embedding is a look-up). With MoE these are the weights of the
    router, of the selected experts, and of the shared expert with its gate. Per sequence of T tokens and layer: causal
    attention has T (T + 1) / 2 pairs, fewer with a sliding window, each 2 x heads x (size of a key + size of a value).
    Latent attention is counted with expanded keys and values. Norms, softmax and activations are not counted.

    Source: Narayanan et al. 2021 (arXiv 2104.04473, appendix), with only the causal half counted and a gated MLP.
    """
    return _weight_flops(arch, seq_lens) + _attention_flops(arch, seq_lens)


def training_flops(arch: ArchSpec, seq_lens: Sequence[int], *, frozen: bool) -> float:
    """Returns the FLOPs of a forward and a backward pass over sequences, counted as in `forward_flops`.

    The backward has two products for each one of the forward. With low-rank adapters the model's weights are frozen and
    have no gradients, so their products have only one; those of the adapters themselves are not counted.

    Args:
        arch: Architecture of the model.
        seq_lens: Length of every sequence, tokens.
        frozen: True if only adapters are trained.
    """
    return (2 if frozen else 3) * _weight_flops(arch, seq_lens) + 3 * _attention_flops(arch, seq_lens)


def _weight_flops(arch: ArchSpec, seq_lens: Sequence[int]) -> float:
    """Returns the FLOPs of a forward's products with weights."""
    attention = attention_weights(arch) * len(arch.softmax_layers)
    if (linear := arch.linear_attention) is not None:
        inputs = linear.channels + linear.value_size + 2 * linear.num_value_heads
        each = arch.hidden_size * (inputs + linear.value_size) + linear.channels * linear.conv_kernel
        attention += len(linear.layers) * each
    moe, with_experts = arch.moe, len(arch.moe_layers)
    mlps = (arch.num_layers - with_experts) * 3 * arch.hidden_size * arch.intermediate_size
    if moe is not None:
        experts = moe.top_k * moe.intermediate_size + moe.shared_intermediate_size
        gate = moe.shared_gate and moe.shared_intermediate_size > 0
        mlps += with_experts * arch.hidden_size * (3 * experts + moe.num_experts + gate)
    outputs = 1 if arch.value_head else arch.vocab_size
    weights = attention + mlps + arch.hidden_size * outputs
    return 2.0 * sum(seq_lens) * weights


def attention_weights(arch: ArchSpec) -> int:
    """Returns the number of weights of one layer's attention: those of its projections, without biases and norms."""
    mla, hidden = arch.mla, arch.hidden_size
    queries = arch.num_heads * arch.head_dim
    if mla is None:
        return hidden * ((3 if arch.output_gate else 2) * queries + 2 * arch.num_kv_heads * arch.head_dim)
    by_queries = hidden * queries if mla.q_lora_rank is None else mla.q_lora_rank * (hidden + queries)
    expanded = arch.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    outputs = arch.num_heads * mla.v_head_dim * hidden
    return by_queries + hidden * mla.cache_dim + mla.kv_lora_rank * expanded + outputs


def _attention_flops(arch: ArchSpec, seq_lens: Sequence[int]) -> float:
    """Returns the FLOPs of a forward's scores and values, and of linear attention's states.

    A token reads its state for its key and for its query, and writes it, one multiplication and addition per element.
    """
    windowed = len(arch.windowed_layers)
    full = len(arch.softmax_layers) - windowed
    pairs = full * _num_pairs(seq_lens, None) + windowed * _num_pairs(seq_lens, arch.sliding_window)
    states = 0.0
    if (linear := arch.linear_attention) is not None:
        elements = linear.num_value_heads * linear.key_head_dim * linear.value_head_dim
        states = 6.0 * len(linear.layers) * elements * sum(seq_lens)
    return 2.0 * arch.num_heads * (arch.head_dim + arch.value_dim) * pairs + states


def _num_pairs(seq_lens: Sequence[int], window: int | None) -> int:
    """Returns the pairs of a query and a key that it attends to, in one layer."""
    seen = [length if window is None else min(length, window) for length in seq_lens]
    return sum(most * (most + 1) // 2 + (length - most) * most for length, most in zip(seq_lens, seen, strict=True))


def mfu_metrics(
    arch: ArchSpec,
    seq_lens: Sequence[int],
    *,
    update_s: float,
    num_passes: int,
    world_size: int,
    device_name: str,
    frozen: bool = False,
) -> dict[str, float]:
    """Returns `perf/mfu/actor`, the model FLOPs of the update over the peak of the devices; {} for unknown devices.

    Forward and backward are counted by `training_flops`. Recomputed activations are not counted (MFU, not HFU).

    Args:
        arch: Architecture of the actor.
        seq_lens: Length of every sequence of the step, tokens, over all ranks.
        update_s: Duration of the update, seconds.
        num_passes: Number of times each sequence was trained on (`actor.ppo_epochs`).
        world_size: Number of devices.
        device_name: `torch.cuda.get_device_name()`. Pass "" for an fp32 actor or a CPU: the peaks are those of bf16.
        frozen: True if only low-rank adapters are trained.
    """
    peak = peak_bf16_flops(device_name)
    if peak is None or update_s <= 0:
        return {}
    flops = num_passes * training_flops(arch, seq_lens, frozen=frozen)
    return {"perf/mfu/actor": flops / (update_s * world_size * peak)}


def spread(name: str, values_N: Tensor) -> dict[str, float]:
    """Returns `<name>/{mean,max,min}` of a tensor."""
    values_N = values_N.double()
    return {
        f"{name}/mean": values_N.mean().item(),
        f"{name}/max": values_N.max().item(),
        f"{name}/min": values_N.min().item(),
    }


def _groups(values_N: Tensor, group_id_N: Tensor) -> list[Tensor]:
    """Returns the fp64 values of each group, in ascending order of the group id."""
    order = torch.argsort(group_id_N, stable=True)
    _, counts = torch.unique_consecutive(group_id_N[order], return_counts=True)
    return list(values_N.double()[order].tensor_split(counts.cumsum(0)[:-1]))


def _reduced(name: str, values: Sequence[float]) -> float:
    if name.endswith("max"):
        return max(values)
    return min(values) if name.endswith("min") else sum(values) / len(values)
