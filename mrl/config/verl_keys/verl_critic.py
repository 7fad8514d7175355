"""Keys of verl's `critic` section that map to mrl's; all others need no counterpart."""

from __future__ import annotations

from typing import Any

MAPS: dict[str, tuple[str, Any, str]] = {
    "model.path": ("critic.path", "~/models/deepseek-llm-7b-chat", "null where it is the actor's or not set"),
    "ppo_epochs": ("critic.ppo_epochs", None, ""),
    "cliprange_value": ("critic.cliprange_value", 0.5, ""),
    "loss_agg_mode": ("critic.loss_aggregation", None, "with `_` for `-`; not set: the actor's"),
    "optim.lr": ("critic.lr", 1e-05, ""),
    "optim.weight_decay": ("critic.weight_decay", 0.01, ""),
    "optim.betas": ("critic.adam_beta1", [0.9, 0.999], "and `critic.adam_beta2`"),
    "optim.eps": ("critic.adam_eps", 1e-08, ""),
    "optim.clip_grad": ("critic.clip_grad", 1.0, ""),
    "grad_clip": ("critic.clip_grad", 1.0, "FSDP's"),
    "optim.min_lr": ("critic.min_lr", 0.0, ""),
    "optim.min_lr_ratio": ("critic.min_lr", 0.0, "times the rate"),
    "optim.lr_warmup_steps": ("critic.lr_warmup_steps", -1, "below 0: by the ratio"),
    "optim.lr_warmup_steps_ratio": ("critic.lr_warmup_frac", 0.0, "as the actor's"),
    "optim.lr_decay_style": ("critic.lr_schedule", "constant", "`constant`, `linear` or `cosine`"),
    "optim.lr_scheduler_type": ("critic.lr_schedule", "constant", "FSDP's"),
    "megatron.param_offload": ("critic.param_offload", False, ""),
    "megatron.optimizer_offload": ("critic.optimizer_offload", False, ""),
    "fsdp.param_offload": ("critic.param_offload", False, ""),
    "fsdp.optimizer_offload": ("critic.optimizer_offload", False, ""),
}
"""Key below `critic.` -> (mrl's key, verl's default, how values differ)."""
