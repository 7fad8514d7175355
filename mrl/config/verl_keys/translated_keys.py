"""Verdict on each key of verl's trainer config (verl 0.9.1, `verl/trainer/config/`).

A key maps to one of mrl's, needs no counterpart, or has none. This file has the verdicts, their reasons and verl's
defaults of the keys that map; the other `verl_*.py` files have those of single sections.
`commands/from_verl/translate.py` translates values, and `mrl/docs/verl.md` is generated from here.

Patterns: `*` matches any text, including dots. The first match wins, in the order MAPS, BEFORE_MOOT, MOOT, MISSING.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from mrl.config.verl_keys import (
    verl_async,
    verl_critic,
    verl_distillation,
    verl_earlier,
    verl_lora,
    verl_reward,
    verl_rollout,
)

ROOT = "actor_rollout_ref."
ACTOR = f"{ROOT}actor."
MEGATRON = f"{ACTOR}megatron."
OVERRIDE = f"{MEGATRON}override_transformer_config."
DDP = f"{MEGATRON}override_ddp_config"
OPTIMIZER = f"{ACTOR}optim.override_optimizer_config"
PRECISION = {
    "use_precision_aware_optimizer": False, "main_grads_dtype": "fp32", "exp_avg_dtype": "fp32",
    "exp_avg_sq_dtype": "fp32",
}  # fmt: skip
"""Fields of `optim` that are Megatron's, with verl's defaults."""
FSDP = f"{ACTOR}fsdp_config."
ROLLOUT = f"{ROOT}rollout."
CORRECTION = "algorithm.rollout_correction"

NO_MEDIA = (
    "no images: models are trained on text, and rows with images, videos or audio are refused. Choose a text model and "
    "data"
)

MEDIA_COLUMNS = ("data.image_key", "data.video_key", "data.audio_key")
"""Keys of the columns with images, videos and audio."""
MEDIA_MODELS = re.compile(
    r"(?i)(?<![a-z])(?:[\d.]*vl(?:chat|m)?|vlm|llava|vision|omni|audio|pixtral|molmo|internvl|minicpm-[vo]|idefics)"
    r"(?![a-z])"
)
"""Pattern in the names of models that read images, videos or audio."""

DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
"""verl's name of a dtype -> mrl's."""

_SAME_PARALLEL = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None,
    "sequence_parallel": True,
}  # fmt: skip

MAPS: dict[str, tuple[str, Any, str]] = {
    "data.train_files": ("data.train_files", "~/data/rlhf/gsm8k/train.parquet", "parquet as it is; JSONL too"),
    "data.val_files": ("data.val_files", "~/data/rlhf/gsm8k/test.parquet", ""),
    "data.prompt_key": ("data.prompt_key", "prompt", ""),
    "data.reward_fn_key": ("data.source_key", "data_source", ""),
    "data.train_batch_size": ("train.batch_size", 1024, "prompts, as in verl"),
    "data.max_prompt_length": ("rollout.prompt_length", 512, ""),
    "data.max_response_length": ("rollout.response_length", 512, ""),
    "data.shuffle": ("data.shuffle", True, ""),
    "data.train_max_samples": ("data.train_max_samples", -1, "-1 is `null`; the rows do not depend on the seed"),
    "data.val_max_samples": ("data.val_max_samples", -1, "likewise"),
    "data.seed": ("run.seed", None, ""),
    "data.filter_overlong_prompts": ("data.overlong_prompts", False, "`True` is `drop`"),
    "data.truncation": ("data.overlong_prompts", "error", "`left` is `truncate_left`; other values are not supported"),
    f"{ROOT}model.path": ("model.path", "~/models/deepseek-llm-7b-chat", "a folder, or a cached hub name"),
    f"{ROOT}model.tokenizer_path": ("model.tokenizer", None, ""),
    f"{ROOT}ref.model.path": ("reference.path", None, "in forks of verl; null: the actor's weights"),
    f"{ROOT}model.enable_gradient_checkpointing": ("actor.recompute", True, "FSDP's: `True` is `full`"),
    f"{ACTOR}ppo_mini_batch_size": ("train.minibatch_size", 256, "prompts, as in verl"),
    f"{ACTOR}ppo_epochs": ("actor.ppo_epochs", 1, ""),
    f"{ACTOR}ppo_max_token_len_per_gpu": ("actor.max_tokens_per_microbatch", 16384, "microbatches are always dynamic"),
    f"{ACTOR}ppo_micro_batch_size_per_gpu": (
        "actor.max_tokens_per_microbatch", None, "without `use_dynamic_bsz`: times prompt and response length"),
    f"{ACTOR}use_dynamic_bsz": ("actor.max_tokens_per_microbatch", False, "selects one of the two"),
    f"{ACTOR}use_prefix_grouper": (
        "actor.use_prefix_grouper", False, "speed only; default true, with any layout"),
    f"{ACTOR}optim.lr": ("actor.lr", 1e-6, ""),
    f"{ACTOR}optim.weight_decay": ("actor.weight_decay", 0.01, ""),
    f"{ACTOR}optim.betas": ("actor.adam_beta1", [0.9, 0.999], "and `actor.adam_beta2`"),
    f"{ACTOR}optim.clip_grad": ("actor.clip_grad", 1.0, ""),
    f"{ACTOR}grad_clip": ("actor.clip_grad", 1.0, "FSDP's"),
    f"{ACTOR}optim.min_lr": ("actor.min_lr", 0.0, ""),
    f"{ACTOR}optim.min_lr_ratio": ("actor.min_lr", 0.0, "times the rate"),
    f"{ACTOR}optim.lr_warmup_steps": ("actor.lr_warmup_steps", -1, "below 0: by the ratio"),
    f"{ACTOR}optim.lr_warmup_steps_ratio": (
        "actor.lr_warmup_frac", 0.0, "with `trainer.total_training_steps`, `actor.lr_warmup_steps`"),
    f"{ACTOR}optim.lr_decay_style": ("actor.lr_schedule", "constant", "`constant`, `linear` or `cosine`"),
    f"{ACTOR}optim.lr_scheduler_type": ("actor.lr_schedule", "constant", "FSDP's"),
    f"{ACTOR}clip_ratio_low": ("algorithm.clip_low", 0.2, ""),
    f"{ACTOR}clip_ratio_high": ("algorithm.clip_high", 0.2, ""),
    f"{ACTOR}clip_ratio_c": (
        "algorithm.dual_clip", 3.0, "off by default in mrl; with `dppo_*` it is `algorithm.dppo.ratio_cap`"),
    f"{ACTOR}loss_agg_mode": ("algorithm.loss_aggregation", "token-mean", "with `_` for `-`"),
    f"{ACTOR}loss_scale_factor": ("algorithm.loss_norm_length", None, "with `seq-mean-token-sum-norm`"),
    f"{ACTOR}policy_loss.loss_mode": (
        "algorithm.policy_loss", "vanilla", "`geo_mean` is `gmpo`"),
    **{f"{ACTOR}tau_{sign}": (f"algorithm.sapo.tau_{sign}", default, "") for sign, default in (
        ("pos", 1.0), ("neg", 1.05))},
    **{f"{ACTOR}policy_loss.{name}": (f"algorithm.{loss}.{name}", default, "") for loss, name, default in (
        ("clip_cov", "clip_cov_ratio", 0.0002), ("clip_cov", "clip_cov_lb", 1.0), ("clip_cov", "clip_cov_ub", 5.0),
        ("kl_cov", "kl_cov_ratio", 0.0002), ("kl_cov", "ppo_kl_coef", 0.1), ("dro", "dro_beta", None))},
    f"{ACTOR}entropy_coeff": ("algorithm.entropy_coef", 0, ""),
    f"{ACTOR}use_kl_loss": ("algorithm.kl_in", False, "`True` is `loss`"),
    f"{ACTOR}kl_loss_coef": ("algorithm.kl_coef", 0.001, ""),
    f"{ACTOR}kl_loss_type": ("algorithm.kl_estimator", "low_var_kl", "`kl` is `k1`, `mse` `k2`, `low_var_kl` `k3`"),
    f"{ACTOR}checkpoint.save_contents": (
        "checkpoint.export_hf", ["model", "optimizer", "extra"], "true with `hf_model`; a checkpoint is always full"),
    f"{ACTOR}checkpoint.async_save": ("checkpoint.async_save", False, ""),
    f"{ACTOR}ulysses_sequence_parallel_size": ("parallel.context_parallel_size", 1, "FSDP's"),
    **{f"{MEGATRON}{name}": (f"parallel.{name}", default, "") for name, default in _SAME_PARALLEL.items()},
    f"{MEGATRON}use_distributed_optimizer": ("actor.use_distributed_optimizer", True, ""),
    f"{MEGATRON}param_offload": ("actor.param_offload", False, ""),
    f"{MEGATRON}grad_offload": ("actor.grad_offload", False, "in verl before 0.8"),
    f"{MEGATRON}optimizer_offload": ("actor.optimizer_offload", False, ""),
    f"{MEGATRON}dtype": ("model.dtype", "bfloat16", ""),
    f"{MEGATRON}router_replay.mode": ("actor.router_replay", "disabled", "`R2` is `recompute`, `R3` `rollout`"),
    f"{FSDP}param_offload": ("actor.param_offload", False, ""),
    f"{FSDP}optimizer_offload": ("actor.optimizer_offload", False, ""),
    f"{OVERRIDE}recompute_granularity": (
        "actor.recompute", None, "with a method, number or modules that it lacks: all in `megatron.transformer`"),
    f"{OVERRIDE}recompute_method": ("megatron.transformer", None, "if `actor.recompute` cannot express it"),
    f"{OVERRIDE}recompute_num_layers": ("megatron.transformer", None, "if `actor.recompute` cannot express it"),
    f"{OVERRIDE}recompute_modules": (
        "megatron.transformer", ["core_attn"], "if `actor.recompute` cannot express it"),
    f"{OVERRIDE}attention_backend": ("megatron.transformer", "flash", "`auto` unless set"),
    f"{DDP}.overlap_grad_reduce": ("actor.overlap_grad_reduce", None, ""),
    DDP: ("megatron.ddp", {}, "each field by its name"),
    OPTIMIZER: ("megatron.optimizer", {}, "each field by its name"),
    **{f"{ACTOR}optim.{name}": (
        "megatron.optimizer", default, "with `use_precision_aware_optimizer`" if default == "fp32" else "")
       for name, default in PRECISION.items()},
    **{f"{OVERRIDE}{name}": (f"parallel.{name}", None, "") for name in (
        "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")},
    **{f"{OVERRIDE}{name}": (f"actor.{name}", None, "") for name in (
        "moe_token_dispatcher_type", "moe_router_dtype", "moe_aux_loss_coeff", "moe_z_loss_coeff",
        "moe_router_load_balancing_type", "moe_router_bias_update_rate")},
    **{f"{ROOT}model.{name}": row for name, row in verl_lora.MAPS.items()},
    **{f"{ROLLOUT}{name}": row for name, row in verl_rollout.MAPS.items()},
    "algorithm.adv_estimator": (
        "algorithm.name", "gae",
        "`grpo`, `rloo`, `gpg`, `gdpo`, `opo`, `grpo_passk`; "
        "`gae` is `ppo`, `reinforce_plus_plus` is `reinforce_pp`, `..._baseline` too"),
    "algorithm.gamma": ("algorithm.gamma", 1.0, "with `gae`"),
    "algorithm.lam": ("algorithm.lam", 1.0, "with `gae`"),
    **{f"critic.{key}": row for key, row in verl_critic.MAPS.items()},
    **verl_distillation.MAPS,
    **verl_async.MAPS,
    "trainer.critic_warmup": (
        "train.critic_warmup", 0, "minus 1: in verl the step of that number trains the actor already"),
    "algorithm.norm_adv_by_std_in_grpo": ("algorithm.advantage_std", True, "`False` is `none`"),
    "algorithm.use_kl_in_reward": ("algorithm.kl_in", False, "`True` is `reward`"),
    "algorithm.kl_penalty": ("algorithm.kl_estimator", "kl", "for the KL in the reward"),
    **{f"algorithm.kl_ctrl.{name}": (f"algorithm.kl_ctrl.{name}", default, "for the KL in the reward")
       for name, default in (("type", "fixed"), ("target_kl", 0.1), ("horizon", 10000))},
    "algorithm.kl_ctrl.kl_coef": ("algorithm.kl_coef", 0.001, "for the KL in the reward"),
    "algorithm.filter_groups.enable": ("algorithm.dynamic_sampling", False, ""),
    "algorithm.filter_groups.metric": (
        "algorithm.dynamic_sampling", "reward",
        "mrl compares `acc` and `score`: the reward before the overlong penalty and the KL"),
    "algorithm.filter_groups.max_num_gen_batches": ("algorithm.max_sampling_rounds", 0, "0: mrl's default"),
    **{f"{CORRECTION}.{name}": (f"{CORRECTION}.{name}", default, text) for name, default, text in (
        ("bypass_mode", False, "default true in mrl, unless samples come from older weights"),
        ("loss_type", "ppo_clip", ""),
        ("rollout_is", None, "not with `bypass_mode` and `ppo_clip`, where verl ignores it"),
        ("rollout_is_threshold", 2.0, ""),
        ("rollout_is_batch_normalize", False, "over all ranks and microbatches"),
        ("rollout_rs", None, ""),
        ("rollout_rs_threshold", None, ""))},
    **verl_reward.MAPS,
    "trainer.total_epochs": ("train.num_epochs", 30, "a batch may span two passes"),
    "trainer.total_training_steps": ("train.num_steps", None, "the run ends with the first of the two"),
    "trainer.save_freq": ("checkpoint.interval", -1, "the last step is always saved"),
    "trainer.test_freq": ("train.eval_interval", -1, "held-out prompts are also scored before the first step"),
    "trainer.max_actor_ckpt_to_keep": ("checkpoint.keep_last", None, "null: all in verl, the newest 2 in mrl"),
    "trainer.default_local_dir": (
        "run.output_dir", "checkpoints/${trainer.project_name}/${trainer.experiment_name}", ""),
    "trainer.project_name": ("observe.wandb_project", "verl_examples", "with `wandb` in the logger; names the folder"),
    "trainer.experiment_name": ("run.output_dir", "gsm8k", "part of the default folder"),
    "trainer.logger": ("observe.wandb_project", ["console", "wandb"], "W&B only if it is listed; also `tensorboard`"),
    "trainer.log_val_generations": ("observe.num_samples", 0, "0: mrl's default"),
    "trainer.resume_mode": ("run.resume", "auto", "`disable` is `never`, which refuses a folder with a checkpoint"),
    "trainer.device": ("run.device", "cuda", "`cuda` is `auto`"),
}  # fmt: skip
"""verl's key -> (mrl's key, verl's default, how values differ)."""

PASSED = {OVERRIDE: "megatron.transformer", f"{DDP}.": "megatron.ddp", f"{OPTIMIZER}.": "megatron.optimizer"}
"""Prefix of Megatron's own fields -> section of mrl with the same names."""
ENGINE_ARGUMENTS = {engine: f"{ROLLOUT}engine_kwargs.{engine}." for engine in ("trtllm", "vllm")}
"""Engine -> prefix of its own arguments."""

_OF_A_WORKER = (
    "checkpoint.*", "data_loader_seed", "enable", "entropy_*", "forward_*", "fsdp*", "grad_*", "kl_ctrl.*",
    "load_weight", "log_prob_*", "loss_*", "megatron*", "model.*", "nccl_timeout", "optim.*", "override_config.*",
    "pad_to_length*", "param_offload", "ppo_*", "profiler*", "rollout_n", "shuffle", "strategy", "torchtitan.*",
    "ulysses_*", "use_*", "veomni.*",
)  # fmt: skip
"""Patterns of the settings of verl's critic and reference, below their sections."""

MOOT: dict[str, str] = {
    "*_target_": "the class that verl builds",
    f"{ROOT}hybrid_engine": "actor and engine share the ranks unless `rollout.nnodes` gives the engine its own",
    f"{ROOT}nccl_timeout": "`run.collective_timeout_s` has its own default",
    **dict.fromkeys(
        [f"critic.{name}" for name in _OF_A_WORKER],
        "the critic has the actor's layout, precision, minibatches and microbatches"),
    **dict.fromkeys(
        [f"{ROOT}ref.{name}" for name in _OF_A_WORKER], "the reference has the actor's layout and microbatches"),
    f"{ACTOR}clip_ratio": "verl reads `clip_ratio_low` and `clip_ratio_high`",
    f"{ACTOR}rollout_n": "`rollout.n`",
    f"{ACTOR}strategy": "the actor is Megatron-Core; `parallel` sets how the model is sharded",
    "model_engine": "the actor is Megatron-Core; `parallel` sets how the model is sharded",
    f"{ACTOR}ppo_micro_batch_size": "deprecated in verl",
    f"{ACTOR}optim.total_training_steps": "it follows from the run's length",
    f"{ACTOR}optim.zero_indexed_step": "the schedule counts the steps itself",
    f"{ACTOR}calculate_entropy": "the entropy is always reported",
    f"{ACTOR}calculate_sum_pi_squared": "only other estimators of verl use it",
    f"{ACTOR}use_torch_compile": "speed only; operators are fused by hand",
    f"{ACTOR}*use_fused_kernels": "speed only; logits are computed in chunks, `actor.logprob_chunk_tokens`",
    f"{ACTOR}use_remove_padding": "sequences are always packed",
    f"{ACTOR}entropy_*": "logits are computed in chunks, `actor.logprob_chunk_tokens`",
    f"{ACTOR}*data_loader_seed": "`run.seed` seeds everything",
    f"{ACTOR}*seed": "`run.seed` seeds everything",
    f"{ACTOR}*profiler.*": "no profiler; `timing_s/*` is always measured",
    f"{ACTOR}checkpoint.*": "a checkpoint is always complete",
    f"{ACTOR}*pad_to_length*": "sequences are packed without padding",
    f"{ACTOR}*full_determinism": "runs are always deterministic",
    f"{MEGATRON}dist_ckpt*": "a checkpoint loads at any layout",
    f"{MEGATRON}distrib_optim*": "a checkpoint loads at any layout",
    f"{MEGATRON}*dist_checkpointing*": "weights come from the Hugging Face folder",
    f"{MEGATRON}*mbridge*": "mrl reads the weights itself",
    f"{MEGATRON}entropy_from*": "logits are computed in chunks, `actor.logprob_chunk_tokens`",
    f"{MEGATRON}use_remove_padding": "sequences are always packed",
    f"{MEGATRON}pad_bshd*": "sequences are always packed",
    f"{MEGATRON}forward_only": "it follows from the role",
    f"{OVERRIDE}use_flash_attn": "set `attention_backend` in `megatron.transformer`",
    f"{OVERRIDE}moe_enable_deepep": "set `actor.moe_token_dispatcher_type=flex`",
    f"{ACTOR}*.offload_policy": "`actor.param_offload`",
    **dict.fromkeys(
        [f"{FSDP}*", f"{ACTOR}veomni.*", f"{ACTOR}torchtitan.*", f"{ACTOR}fsdp_config"],
        "only for an actor that is not Megatron-Core"),
    f"{ACTOR}shuffle": "minibatches follow the order of the prompts",
    f"{ROOT}model.use_shm": "files are read in place",
    f"{ROOT}model.use_remove_padding": "sequences are always packed",
    f"{ROOT}model.use_liger": "speed only",
    f"{ROOT}model.*fused_kernel*": "speed only",
    **{f"{ROOT}model.{name}": why for name, why in verl_lora.MOOT.items()},
    f"{ROOT}model.tiled_mlp.num_shards": "no tiled MLPs",
    f"{ROOT}model.enable_activation_offload": "`actor.recompute` saves the memory",
    **{f"{ROLLOUT}{name}": why for name, why in verl_rollout.NEEDLESS.items()},
    f"{ROLLOUT}profiler.tool_config.*": verl_rollout.NEEDLESS["profiler.tool_config"],
    f"{ROLLOUT}engine_kwargs.sglang.*": verl_rollout.NEEDLESS["engine_kwargs.sglang"],
    "data.tokenizer": "the model's is used; `model.tokenizer` sets another",
    "data.use_shm": "files are read in place",
    "data.gen_batch_size": "dynamic sampling draws as many prompts as are missing",
    "data.val_batch_size": "held-out prompts are sampled all at once",
    "data.return_*": "messages and token ids are always available",
    "data.dataloader_num_workers": "prompts are read on demand",
    "data.filter_overlong_prompts_workers": "prompts are read on demand",
    "data.validation_shuffle": "the order of held-out prompts has no effect",
    **dict.fromkeys(
        ("data.tool_config_path", "data.function_tool_path"), "verl's rollout section has its own key for the tools"),
    "data.image_patch_size": "only for images",
    **verl_reward.MOOT,
    "algorithm.filter_groups.max_inflight_gen_batches": "batches are sampled one after the other",
    "algorithm.pf_ppo.*": "no PF-PPO",
    "algorithm.rollout_correction.loss_type": "the clipped surrogate",
    **verl_distillation.MOOT,
    "transfer_queue.*.*": "only for verl's transfer queue",
    "trainer.balance_batch": "sequences are always balanced by tokens",
    "trainer.nnodes": "hosts of `mrl launch` or NNODES",
    "trainer.n_gpus_per_node": "ranks of a host, NPROC_PER_NODE",
    "trainer.*_data_dir": "`samples.jsonl` in the run folder contains some samples",
    "trainer.esi_redundant_time": "SLURM's time limit is respected automatically; see also `run.max_time_s`",
    "trainer.max_critic_ckpt_to_keep": "a checkpoint contains both models",
    "trainer.del_local_ckpt_after_load": "`checkpoint.keep_last` limits the number of checkpoints",
    "trainer.ray_*": "no Ray",
    **verl_earlier.MOOT,
    "trainer.use_v1": "one loop",
    "trainer.use_legacy_worker_impl": "one loop",
    **verl_async.MOOT,
    "global_profiler.*": "no profiler; `timing_s/*` is always measured",
    "skip.*.*_*": "for verl's developers",
    "skip.*.steps": "for verl's developers",
    "skip.*.action": "for verl's developers",
    "ray_kwargs.*": "no Ray",
}  # fmt: skip
"""Pattern -> why no value needs a counterpart."""

BEFORE_MOOT: dict[str, str] = {
    **{
        f"critic.model.{name}": verl_lora.NO_CRITIC
        for name in ("lora_rank", "lora.rank", "lora_adapter_path", "lora.adapter_path")
    },
    f"{ROOT}ref.model*": "the reference has the actor's structure; only its weights can be others, `reference.path`",
}
"""Pattern -> why there is no counterpart, for keys that a wider pattern of MOOT matches too."""

MISSING: dict[str, str] = {
    f"{ACTOR}policy_loss.*": "mrl does not have this loss",
    f"{ACTOR}freeze_vision_tower": NO_MEDIA,
    f"{ACTOR}*qat.*": "no quantized training",
    f"{ACTOR}optim.*": "the optimizer is AdamW with decoupled weight decay and fp32 states",
    f"{MEGATRON}use_megatron_fsdp": "no FSDP",
    f"{MEGATRON}*dynamic_context_parallel": "the context-parallel size is fixed",
    f"{MEGATRON}max_seqlen_per_dp_cp_rank": "the context-parallel size is fixed",
    f"{MEGATRON}router_replay.*": "routing records are sent with the samples, not stored in files",
    f"{MEGATRON}override_mcore_model_config*": "the model's structure comes from its config.json: change it there",
    **{f"{ROOT}model.{name}": why for name, why in verl_lora.MISSING.items()},
    f"{ROOT}model.mtp.*": "no multi-token prediction",
    f"{ROOT}model.custom_chat_template": "write the template into a file and set `data.chat_template`",
    f"{ROOT}model.hf_config_path": "config.json must be in the model's folder",
    f"{ROOT}model.trust_remote_code": "no code of a model folder is run",
    f"{ROOT}model.external_lib": "no code of a model folder is run",
    f"{ROOT}model.override_config*": "the model's structure comes from its config.json: change it there",
    f"{ROOT}model.tiled_mlp.enabled": "`actor.recompute` saves the memory",
    **{f"{ROLLOUT}{name}": why for name, why in verl_rollout.ABSENT.items()},
    f"{ROLLOUT}multi_turn.interaction_config_path": "write the interaction as an environment, "
    "`rollout.agent.environment`",
    **dict.fromkeys(("data.image_key", "data.video_key", "data.audio_key", "data.mm_*"), NO_MEDIA),
    "data.trust_remote_code": "no code of a tokenizer folder is run",
    "data.custom_cls.*": "rows come from files, or from your own class, `data.task`",
    "data.datagen.*": "rows come from files, or from your own class, `data.task`",
    "data.sampler.*": "write the sampler as a function that orders each epoch by the rows and their past rewards, "
    "`data.order_by=path/to/file.py:function`",
    "data.apply_chat_template_kwargs*": "set the variables in your own template, `data.chat_template`",
    **verl_reward.MISSING,
    "algorithm.use_pf_ppo": "no PF-PPO",
    **verl_earlier.MISSING,
    "transfer_queue.*": "ranks exchange samples directly",
    "trainer.val_before_train": "held-out prompts are always scored before the first step",
    "trainer.val_only": "`mrl evaluate` scores without training",
    "trainer.resume_from_path": "a run resumes in its own folder: set `run.output_dir`",
    "trainer.checkpoint_callback_class": "no callbacks",
    "trainer.default_hdfs_dir": "a run folder is on a file system",
    **verl_async.MISSING,
    "skip.*": "for verl's developers",
}
"""Pattern -> why there is no counterpart; harmless if the key is off or at a value of `HARMLESS`."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    f"{ACTOR}optim.min_lr_factor": (0.0,),
    f"{ACTOR}optim.optimizer": ("adam", "adamw", "AdamW"),
    f"{ACTOR}optim.optimizer_impl": ("torch.optim",),
    f"{ACTOR}optim.name": ("AdamW",),
    f"{ACTOR}optim.eps": (1e-8,),
    f"{ACTOR}optim.weight_decay_incr_style": ("constant",),
    **dict.fromkeys(
        (
            "data.apply_chat_template_kwargs.*",
            "reward.reward_kwargs.*",
            f"{ROOT}model.override_config.*",
            f"{MEGATRON}override_mcore_model_config.*",
        ),
        (),
    ),
    f"{ROOT}model.override_config.*dropout": (0, 0.0),
    f"{ROOT}model.override_config.*pdrop": (0, 0.0),
    "trainer.val_before_train": (True,),
    "data.image_key": ("images",),
    "data.video_key": ("videos",),
    "data.audio_key": ("audios",),
    f"{ROLLOUT}agent.default_agent_loop": ("single_turn_agent", "tool_agent"),
    f"{ROLLOUT}multi_turn.use_inference_chat_template": (False,),
}
"""Values with the meaning that mrl has anyway; for these keys, a value of `OFF` is not harmless by itself."""

WITH_ITS_SWITCH: tuple[str, ...] = (
    f"{ACTOR}policy_loss.*_*", f"{ACTOR}*qat.*", f"{ACTOR}optim.muon_*", f"{ACTOR}optim.lr_*",
    f"{ACTOR}optim.num_cycles", f"{ACTOR}optim.decay_type", f"{ROOT}model.lora.*", f"{ROOT}model.mtp.*",
    "transfer_queue.*",
)  # fmt: skip
"""Keys of MISSING that only modify a feature; without its switch they have no effect."""

SWITCHES: tuple[str, ...] = (
    "*.enable", "*.enabled", "*.loss_mode", "*.enable_train", "*.enable_rollout",
)  # fmt: skip
"""Keys that enable a feature."""

UNREAD: dict[str, tuple[bool, str]] = {
    "algorithm.kl_ctrl.kl_coef": (
        True,
        "verl reads it with algorithm.use_kl_in_reward=True only, so that no KL is in the reward (verl before 0.3 read "
        "it always: algorithm.kl_in=reward and algorithm.kl_coef here)"),
    "algorithm.kl_*": (False, "read with algorithm.use_kl_in_reward=True only"),
    f"{ACTOR}kl_loss_*": (False, f"read with {ACTOR}use_kl_loss=True only"),
    f"{ROLLOUT}multi_turn.tool_config_path": (
        True, f"read with {ROLLOUT}multi_turn.enable=True only: this run has one turn and no tools"),
    f"{ROLLOUT}multi_turn.*": (True, f"read with {ROLLOUT}multi_turn.enable=True only: this run has one turn"),
    f"{ROLLOUT}agent.*": (False, f"of conversations: read with {ROLLOUT}multi_turn.enable=True only"),
    f"{ROLLOUT}val_kwargs.*": (False, f"read with {ROLLOUT}val_kwargs.do_sample=True and a temperature only"),
    **dict.fromkeys(
        (f"{ROOT}model.*lora*", f"{ROOT}model.target_modules", f"{ROOT}model.exclude_modules"),
        (False, "only with a rank above 0, of the actor that the run has")),
    "critic.*": (False, "this algorithm.adv_estimator has no critic"),
    "algorithm.filter_groups.*": (False, "read with algorithm.filter_groups.enable=True only"),
    "distillation.*": (False, "read with distillation.enabled=True only"),
    "*reward_model.*": (False, "read with its `enable` only"),
    "*": (False, "nothing reads it with the other settings"),
}  # fmt: skip
"""Pattern -> (whether the key is listed as lost, why its value has no effect), for keys that map."""

OFF: tuple[Any, ...] = (None, False, 0, -1, "", "null", "disabled", [], {})
"""Values that mean "off"."""


@dataclass(frozen=True)
class KeyVerdict:
    """Verdict on a key.

    Attributes:
        kind: "maps", "moot" (needs no counterpart), "missing" (has none), or "unknown".
        to: mrl's key, if it maps.
        text: How values differ, or why there is no counterpart.
    """

    kind: Literal["maps", "moot", "missing", "unknown"]
    to: str = ""
    text: str = ""


def verdict(key: str) -> KeyVerdict:
    """Returns the verdict on a dotted key of verl's trainer config."""
    key = verl_distillation.of_any_teacher(key)
    if key in MAPS:
        to, _, text = MAPS[key]
        return KeyVerdict("maps", to, text)
    pattern = _first(BEFORE_MOOT, key)
    if pattern is not None:
        return KeyVerdict("missing", "", BEFORE_MOOT[pattern])
    pattern = _first(MOOT, key)
    if pattern is not None:
        return KeyVerdict("moot", "", MOOT[pattern])
    for prefix, section in PASSED.items():
        if key.startswith(prefix):
            return KeyVerdict("maps", section, "Megatron's own, by its name there")
    for prefix in ENGINE_ARGUMENTS.values():
        if key.startswith(prefix):
            return KeyVerdict("maps", *MAPS[prefix.removesuffix(".")][::2])
    pattern = _first(MISSING, key)
    return KeyVerdict("unknown") if pattern is None else KeyVerdict("missing", "", MISSING[pattern])


def not_read(key: str) -> tuple[bool, str]:
    """Returns whether a mapped key without effect is listed as lost, and why it has no effect."""
    return UNREAD[_first(UNREAD, key) or "*"]


def is_harmless(key: str, value: Any) -> bool:
    """Returns whether a value of a key without a counterpart loses nothing."""
    meant = [values for pattern, values in HARMLESS.items() if fnmatchcase(key, pattern)]
    if value is None or meant:
        return value is None or any(value in values for values in meant)
    if any(type(value) is type(off) and value == off for off in OFF):
        return True
    return any(fnmatchcase(key, one) for one in WITH_ITS_SWITCH) and not any(fnmatchcase(key, one) for one in SWITCHES)


def _first(patterns: Mapping[str, object], key: str) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(key, pattern)), None)
