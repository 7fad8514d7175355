"""Names of other trainers (verl, TRL, NeMo-RL, Megatron) for mrl's keys, for error messages."""

from __future__ import annotations

import re
from typing import Any

from mrl.config.verl_keys import verl_lora
from mrl.config.verl_keys.loss_names import VALUES
from mrl.config.verl_keys.translated_keys import NO_MEDIA, ROOT, KeyVerdict, verdict
from mrl.config.verl_keys.verl_rollout import section_of

TRL = {
    "num_generations": "rollout.n",
    "num_generations_eval": "rollout.val_kwargs.n",
    "max_completion_length": "rollout.response_length",
    "max_prompt_length": "rollout.prompt_length",
    "num_iterations": "actor.ppo_epochs",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "delta": "algorithm.dual_clip",
    "beta": "algorithm.kl_coef",
    "loss_type": "algorithm.loss_aggregation",
    "scale_rewards": "algorithm.advantage_std",
    "mask_truncated_completions": "algorithm.overlong.mask_truncated",
    "reward_weights": "reward.functions",
    "reward_funcs": "reward.functions",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "vllm_max_model_length": "rollout.max_model_len",
    "vllm_importance_sampling_correction": "algorithm.rollout_correction.rollout_is",
    "vllm_importance_sampling_mode": "algorithm.rollout_correction.rollout_is",
    "vllm_importance_sampling_cap": "algorithm.rollout_correction.rollout_is_threshold",
    "vllm_importance_sampling_clip_max": "algorithm.rollout_correction.rollout_is_threshold",
    "vllm_importance_sampling_clip_min": "algorithm.rollout_correction.rollout_is_threshold",
    "off_policy_mask_threshold": "algorithm.rollout_correction.off_policy_mask_threshold",
    "shuffle_dataset": "data.shuffle",
    "learning_rate": "actor.lr",
    "lr_scheduler_type": "actor.lr_schedule",
    "warmup_steps": "actor.lr_warmup_steps",
    "adam_beta1": "actor.adam_beta1",
    "adam_beta2": "actor.adam_beta2",
    "adam_epsilon": "actor.adam_eps",
    "max_grad_norm": "actor.clip_grad",
    "num_train_epochs": "train.num_epochs",
    "max_steps": "train.num_steps",
    "per_device_train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "actor.max_tokens_per_microbatch",
    "gradient_checkpointing": "actor.recompute",
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "train.eval_interval",
    "report_to": "observe.wandb_project",
    "assistant_only_loss": "data.train_on_turns",
    "chat_template_path": "data.chat_template",
}
"""Field of TRL's GRPOConfig or SFTConfig, or argument of its GRPOTrainer -> mrl's key."""

MEGATRON = {
    "global_batch_size": "train.batch_size",
    "micro_batch_size": "actor.max_tokens_per_microbatch",
    "train_iters": "train.num_steps",
    "lr_decay_style": "actor.lr_schedule",
    "lr_warmup_iters": "actor.lr_warmup_steps",
    "min_lr": "actor.min_lr",
    "adam_eps": "actor.adam_eps",
    "recompute_granularity": "actor.recompute",
    "num_layers_per_virtual_pipeline_stage": "parallel.virtual_pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank": "parallel.virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers": "parallel.num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "parallel.num_layers_in_last_pipeline_stage",
    "moe_enable_routing_replay": "actor.router_replay",
    "save_interval": "checkpoint.interval",
    "eval_interval": "train.eval_interval",
    "wandb_project": "observe.wandb_project",
    "load": "model.path",
    "save": "run.output_dir",
}
"""Argument of Megatron's training script or its config -> mrl's key."""

NEMO_RL = {
    "model_name": "model.path",
    "num_prompts_per_step": "train.batch_size",
    "num_generations_per_prompt": "rollout.n",
    "train_global_batch_size": "train.minibatch_size",
    "train_micro_batch_size": "actor.max_tokens_per_microbatch",
    "train_mb_tokens": "actor.max_tokens_per_microbatch",
    "max_num_steps": "train.num_steps",
    "max_num_epochs": "train.num_epochs",
    "max_rollout_turns": "rollout.multi_turn.max_assistant_turns",
    "max_total_sequence_length": "rollout.response_length",
    "max_new_tokens": "rollout.response_length",
    "val_period": "train.eval_interval",
    "save_period": "checkpoint.interval",
    "keep_top_k": "checkpoint.keep_best",
    "metric_name": "checkpoint.best_metric",
    "checkpoint_dir": "run.output_dir",
    "normalize_rewards": "algorithm.advantage_std",
    "use_dynamic_sampling": "algorithm.dynamic_sampling",
    "dynamic_sampling_max_gen_batches": "algorithm.max_sampling_rounds",
    "overlong_filtering": "algorithm.overlong.mask_truncated",
    "overlong_buffer_length": "algorithm.overlong.buffer_length",
    "overlong_buffer_penalty": "algorithm.overlong.penalty",
    "reference_policy_kl_penalty": "algorithm.kl_coef",
    "reference_policy_kl_type": "algorithm.kl_estimator",
    "ratio_clip_min": "algorithm.clip_low",
    "ratio_clip_max": "algorithm.clip_high",
    "ratio_clip_c": "algorithm.dual_clip",
    "token_level_loss": "algorithm.loss_aggregation",
    "use_importance_sampling_correction": "algorithm.rollout_correction.rollout_is",
    "truncated_importance_sampling_ratio": "algorithm.rollout_correction.rollout_is_threshold",
    "positive_example_nll_weight": "algorithm.positive_example_nll_weight",
    "max_trajectory_age_steps": "train.max_off_policy_steps",
    "val_temperature": "rollout.val_kwargs.temperature",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "activation_checkpointing": "actor.recompute",
}
"""Key of NeMo-RL's GRPO config, without its sections -> mrl's key."""

PEFT = {"r": "rank", "lora_rank": "rank", "lora_alpha": "alpha", "init_lora_weights": "init"}
"""Names of PEFT -> fields of `actor.lora` and `critic.lora`."""

_ABSENT: dict[re.Pattern[str], str] = {
    **verl_lora.HINTS,
    re.compile(r"(?<![a-z])(?<!container_)(?:images?|videos?|audios?|vision|vlm|mm|multi_?modal)(?![a-z])"): NO_MEDIA,
}
"""Pattern in a key, in any trainer's words -> why mrl does not have it, or its section."""


def value_hint(key: str, value: Any) -> str:
    """Returns a hint about another trainer's value of a field, " 'x' is y."; "" if no trainer has this value."""
    found = VALUES.get((key, value)) if isinstance(value, str) else None
    return f" '{value}' {found}." if found else ""


BEFORE = {
    "algorithm.proximal": "algorithm.rollout_correction.bypass_mode (recompute: false)",
    "algorithm.tis_clip": "algorithm.rollout_correction.rollout_is_threshold, with rollout_is=token",
}
"""Key of an earlier mrl version -> its replacement."""


def key_hint(key: str) -> str:
    """Returns the mrl key for a key of another trainer or of an earlier mrl, or why there is none; "" if unknown."""
    if key in BEFORE:
        return f"'{key}' is {BEFORE[key]}."
    section, _, last = key.rpartition(".")
    if section in ("actor.lora", "critic.lora") and last in PEFT:
        return f"'{last}' is PEFT's name for {section}.{PEFT[last]}."
    found = _of_verl(key)
    if found.kind == "maps":
        more = f" ({found.text})" if found.text else ""
        return f"'{key}' is verl's name for {found.to}{more}; `mrl from-verl` translates a whole command line."
    absent = next((why for pattern, why in _ABSENT.items() if pattern.search(key.lower())), "")
    if found.kind in ("moot", "missing") and "." in key:
        needs = "needs nothing" if found.kind == "moot" else "has no place"
        return f"'{key}' of verl {needs} here: {found.text}." + ("" if absent in found.text else f" mrl has {absent}.")
    if absent:
        return f"mrl has {absent}."
    name = key.rpartition(".")[2]
    for table, owner in ((TRL, "TRL"), (NEMO_RL, "NeMo-RL"), (MEGATRON, "Megatron")):
        if name in table:
            return f"'{name}' is {owner}'s name for {table[name]}."
    return ""


def _of_verl(key: str) -> KeyVerdict:
    """Returns the verdict on a verl key, or on a key of mrl's `rollout` by its name in verl's rollout section."""
    section, _, name = key.partition(".")
    if section != "rollout" or not name:
        return verdict(key)
    found = verdict(f"{ROOT}{key}")
    return verdict(f"{ROOT}rollout.{section_of(name)}") if found.kind == "unknown" and section_of(name) else found
