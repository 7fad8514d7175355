"""Ranges of all numbers outside the section `algorithm`, and fields with a single allowed value. Imports no torch.

The ranges of algorithm fields are in `algorithms/base.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrl.config.config import Config

WEIGHTS = "[-1e9, 1e9]"
"""Range of the weight of a reward function."""

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
    "train.critic_warmup": "[0, 1e9]",
    "train.eval_interval": "[0, 1e9]",
    "train.early_stopping.patience": "[0, 1e9]",
    "train.early_stopping.min_delta": "[0, 1e9]",
    "train.max_off_policy_steps": "[0, 1024]",
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
    "actor.lr_warmup_frac": "[0, 1]",
    "actor.lr_decay_frac": "(0, 1]",
    "actor.weight_decay": "[0, 1000]",
    "actor.adam_beta1": "[0, 1)",
    "actor.adam_beta2": "[0, 1)",
    "actor.adam_eps": "[1e-30, 1]",
    "actor.clip_grad": "[0, 1e9]",
    "actor.max_tokens_per_microbatch": "[1, 1e9]",
    "actor.logprob_chunk_tokens": "[1, 1e9]",
    "actor.moe_aux_loss_coeff": "[0, 1000]",
    "actor.moe_z_loss_coeff": "[0, 1000]",
    "actor.moe_router_bias_update_rate": "[0, 1]",
    "actor.lora.rank": "[0, 4096]",
    "actor.lora.alpha": "(0, 1e6]",
    "actor.lora.loraplus_lr_ratio": "(0, 1e4]",
    "critic.lora.rank": "[0, 4096]",
    "critic.lora.alpha": "(0, 1e6]",
    "critic.lora.loraplus_lr_ratio": "(0, 1e4]",
    "critic.ppo_epochs": "[1, 1e6]",
    "critic.cliprange_value": "[0, 1e9]",
    "critic.lr": "[0, 100]",
    "critic.min_lr": "[0, 100]",
    "critic.lr_warmup_steps": "[0, 1e9]",
    "critic.lr_warmup_frac": "[0, 1]",
    "critic.lr_decay_frac": "(0, 1]",
    "critic.weight_decay": "[0, 1000]",
    "critic.adam_beta1": "[0, 1)",
    "critic.adam_beta2": "[0, 1)",
    "critic.adam_eps": "[1e-30, 1]",
    "critic.clip_grad": "[0, 1e9]",
    "data.train_weights": "(0, 1e9]",
    "data.train_max_samples": "[1, 1e12]",
    "data.val_max_samples": "[1, 1e12]",
    "reference.update_interval": "[0, 1e9]",
    "distillation.distillation_loss.topk": "[1, 1048576]",
    "distillation.distillation_loss.beta": "(0, 1)",
    "distillation.distillation_loss.distillation_loss_coef": "[0, 1e9]",
    "distillation.distillation_loss.loss_max_clamp": "(0, 1e9]",
    "distillation.distillation_loss.log_prob_min_clamp": "[-1e9, 0)",
    "distillation.distillation_loss.clip_ratio_low": "(0, 1]",
    "distillation.distillation_loss.clip_ratio_high": "(0, 1e9]",
    "rollout.n": "[1, 65536]",
    "rollout.over_sample_rate": "[0, 16]",
    "rollout.temperature": "[1e-6, 1e6]",
    "rollout.top_k": "-1 or [1, 1e9]",
    "rollout.top_p": "(0, 1]",
    "rollout.min_p": "[0, 1)",
    "rollout.repetition_penalty": "(0, 1000]",
    "rollout.prompt_length": "[1, 16777216]",
    "rollout.response_length": "[1, 16777216]",
    "rollout.max_model_len": "[2, 33554432]",
    "rollout.tensor_model_parallel_size": "[1, 131072]",
    "rollout.num_ranks": "[0, 131072]",
    "rollout.nnodes": "[0, 131072]",
    "rollout.n_gpus_per_node": "[1, 4096]",
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
    "rollout.multi_turn.max_assistant_turns": "[1, 1e9]",
    "rollout.multi_turn.max_user_turns": "[1, 1e9]",
    "rollout.multi_turn.max_parallel_calls": "[1, 1e6]",
    "rollout.multi_turn.max_tool_response_length": "[1, 1e9]",
    "rollout.agent.num_workers": "[1, 1024]",
    "rollout.agent.time_limit_s": "[0.001, 31536000]",
    "rollout.agent.memory_limit_mb": "0 or [256, 1e9]",
    "rollout.checkpoint_engine.update_weights_bucket_megabytes": "[1, 1048576]",
    "rollout.speculative.num_speculative_tokens": "[1, 64]",
    "rollout.speculative.prompt_lookup_max": "[1, 64]",
    "rollout.speculative.prompt_lookup_min": "[1, 64]",
    **{f"reward.model.{name}": WEIGHTS for name in ("weight",)},
    "reward.time_limit_s": "[0.001, 31536000]",
    "reward.num_workers": "[1, 1024]",
    "reward.memory_limit_mb": "0 or [256, 1e9]",
    "reward.cache_mb": "[0, 1e6]",
    "reward.error_value": "[-1e9, 1e9]",
    "reward.max_failed_frac": "[0, 1]",
    "checkpoint.interval": "[0, 1e9]",
    "checkpoint.keep_last": "[1, 1e9]",
    "checkpoint.keep_best": "[0, 1e9]",
    "observe.num_samples": "[0, 1e9]",
}
"""Allowed intervals or single values of every number outside `algorithm`. Upper limits are beyond any sensible use
and catch typing errors before processes start, memory is allocated or a number overflows."""

FIXED = {
    "rollout.repetition_penalty": (1.0, "the log-probabilities that train would not be those that sampled"),
    "rollout.calculate_log_probs": (True, "log-probabilities captured at sampling time are pi_old"),
}
"""Fields with a single allowed value, and the reason."""


def range_rules(config: Config) -> Iterator[str]:
    """Yields a message for each number out of its range."""
    for key, allowed in RANGES.items():
        found = value_at(config, key)
        named = {f"{key}[{index}]": one for index, one in enumerate(found)} if isinstance(found, list) else {key: found}
        for name, value in named.items():
            if value is not None and not in_range(float(value), allowed):
                yield f"{name}={value} is out of range; expected {allowed}."
    for index, function in enumerate(config.reward.functions):
        if not in_range(function.weight, WEIGHTS):
            yield f"reward.functions[{index}].weight={function.weight} is out of range; expected {WEIGHTS}."


def fixed_rules(config: Config) -> Iterator[str]:
    """Yields a message for each field of `FIXED` with another value."""
    for key, (only, reason) in FIXED.items():
        value = value_at(config, key)
        if value != only:
            yield f"{key}={value} is refused; it must be {only}: {reason}. Remove it."


def value_at(config: Any, key: str) -> Any:
    """Returns the value at a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def in_range(value: float, allowed: str) -> bool:
    """Returns whether a number is allowed by an entry of `RANGES`."""
    return any(_within(value, part) for part in allowed.split(" or "))


def _within(value: float, allowed: str) -> bool:
    """Returns whether a number is in an interval such as "[low, high)" or equals a single value; False for NaN."""
    if allowed[0] not in "[(":
        return value == float(allowed)
    low, high = (float(bound) for bound in allowed[1:-1].split(","))
    above = low <= value if allowed[0] == "[" else low < value
    return above and (value <= high if allowed[-1] == "]" else value < high)
