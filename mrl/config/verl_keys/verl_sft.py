"""Verdicts on the keys of verl's SFT trainers (`fsdp_sft_trainer`, `sft_trainer`).

Most keys are those of its RL trainer with another name: RENAMED. The rest map, need no counterpart, or have none.
"""

from __future__ import annotations

from typing import Any

_ACTOR = "actor_rollout_ref.actor."
_MODEL = "actor_rollout_ref.model."

RENAMED: dict[str, str] = {
    "model.partial_pretrain": f"{_MODEL}path",
    "model.fsdp_config.offload_params": f"{_ACTOR}fsdp_config.param_offload",
    "optim.lr_scheduler": f"{_ACTOR}optim.lr_scheduler_type",
    "optim.warmup_style": f"{_ACTOR}optim.lr_scheduler_type",
    "optim.warmup_steps_ratio": f"{_ACTOR}optim.lr_warmup_steps_ratio",
    "ulysses_sequence_parallel_size": f"{_ACTOR}ulysses_sequence_parallel_size",
    "engine.ulysses_sequence_parallel_size": f"{_ACTOR}ulysses_sequence_parallel_size",
    "use_remove_padding": f"{_MODEL}use_remove_padding",
    "engine.use_remove_padding": f"{_MODEL}use_remove_padding",
    "data.micro_batch_size_per_gpu": f"{_ACTOR}ppo_micro_batch_size_per_gpu",
    "data.max_token_len_per_gpu": f"{_ACTOR}ppo_max_token_len_per_gpu",
    "data.use_dynamic_bsz": f"{_ACTOR}use_dynamic_bsz",
    "trainer.seed": "data.seed",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
}
"""SFT key -> RL key."""

SECTIONS: dict[str, str] = {
    "model.": _MODEL, "optim.": f"{_ACTOR}optim.", "checkpoint.": f"{_ACTOR}checkpoint.",
    "trainer.checkpoint.": f"{_ACTOR}checkpoint.",
}  # fmt: skip
"""Section of the SFT config -> section of the RL config; that of `engine.` depends on the engine."""

DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 256,
    f"{_ACTOR}ppo_micro_batch_size_per_gpu": 4,
    "trainer.total_epochs": 4,
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
    "data.seed": 1,
}
"""Defaults of both trainers, by RL key."""

DEFAULTS_OF_FSDP: dict[str, Any] = {
    f"{_ACTOR}optim.lr": 1e-5,
    f"{_ACTOR}optim.betas": [0.9, 0.95],
    f"{_ACTOR}optim.lr_warmup_steps_ratio": 0.1,
    f"{_ACTOR}optim.lr_scheduler_type": "cosine",
}
"""Defaults of `fsdp_sft_trainer`."""

DEFAULTS_OF_ENGINES: dict[str, Any] = {
    f"{_ACTOR}optim.lr": 1e-3,
    f"{_ACTOR}use_dynamic_bsz": True,
    f"{_ACTOR}ppo_max_token_len_per_gpu": 8192,
}
"""Defaults of `sft_trainer` and `sft_trainer_ray`."""

MOOT: dict[str, str] = {
    "data.pad_mode": "sequences are always packed",
    "data.micro_batch_size": "deprecated in verl",
    "data.balance_dp_token": "sequences are always balanced by tokens",
    "data.num_workers": "rows are read on demand",
    "data.use_shm": "files are read in place",
    "data.multiturn.enable": "a row with `data.messages_key` and without `data.prompt_key` is a conversation",
    "data.ignore_input_ids_mismatch": "a conversation is rendered as one text, and turns are located in it",
    "engine": "the actor is Megatron-Core",
    "optim": "the actor is Megatron-Core",
    "model": "the model's folder describes it",
    "engine.strategy": "the actor is Megatron-Core",
    "model.strategy": "the actor is Megatron-Core",
    "model.fsdp_config.*": "only for an actor that is not Megatron-Core",
    "trainer.profile_interval": "no profiler; `timing_s/*` is always measured",
    "profiler.*": "no profiler; `timing_s/*` is always measured",
}
"""Pattern -> why no value needs a counterpart."""

MISSING: dict[str, str] = {
    "data.tools_key": "tools of a conversation come from an environment, `rollout.agent.environment`",
    "data.multiturn.tools_key": "tools of a conversation come from an environment, `rollout.agent.environment`",
    "data.*enable_thinking*": "set the variable in your own template, `data.chat_template`",
    "data.chat_template": "write the template into a file and set `data.chat_template`",
    "data.custom_cls.*": "rows come from files, or from your own class, `data.task`",
}
"""Pattern -> why there is no counterpart; harmless if it is null."""
