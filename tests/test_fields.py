"""Every field of the config changes something that can be observed, or says where it is and why not here."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mrl.config.config import Config, RewardFunctionConfig, TeacherConfig
from mrl.config.keys import dotted_keys
from tests.data.fields import COLUMNS, TALKS, WARM, write
from tests.distilled import ROWS as DISTILLATION
from tests.observed import Facts, bounds, course, files, laid, read
from tests.source import ROOT


@dataclass(frozen=True)
class Row:
    """How a field shows.

    Attributes:
        changed: Overrides that set it, and what it cannot do without.
        given: Overrides on both sides.
        by: Who observes.
        refused: Part of the message where the changed side is refused; "": it runs. The other side always does.
    """

    changed: tuple[str, ...]
    given: tuple[str, ...] = ()
    by: Callable[..., Facts] = course
    refused: str = ""


def row(*changed: str, given: tuple[str, ...] = (), by: Callable[..., Facts] = course, refused: str = "") -> Row:
    return Row(changed, given, by, refused)


MIXTURE = (
    "model.preset=qwen3_moe_tiny",
    "model.overrides={hidden_size: 16, num_hidden_layers: 1, intermediate_size: 16, num_attention_heads: 2, "
    "num_key_value_heads: 2, moe_intermediate_size: 16}",
)
BIASED = (
    "model.preset=glm4_moe_tiny",
    "model.overrides={hidden_size: 16, num_hidden_layers: 2, intermediate_size: 16, num_attention_heads: 2, "
    "num_key_value_heads: 2, moe_intermediate_size: 16}",
)
LORA = ("actor.lora.rank=4", "actor.lr=0.1")
CRITIC_LORA = ("algorithm.name=ppo", *LORA, "critic.lora.rank=4", "critic.lr=0.1")
DEEP = ("model.overrides.num_hidden_layers=4",)
TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
SHARED = (*MIXTURE, f"{TP}=2", "parallel.sequence_parallel=true", "parallel.expert_model_parallel_size=2")
CHARGED = ("algorithm.name=reinforce_pp", "algorithm.kl_in=reward", "train.num_steps=3", "actor.lr=0.1")
DPO = ("algorithm.name=dpo", "algorithm.dpo.loss_type=robust", "train.minibatch_size=null", "train.num_steps=2")
ADAPTIVE_KL = (*CHARGED, "algorithm.kl_ctrl={type: adaptive, target_kl: 100, horizon: 20}")
PPO = ("algorithm.name=ppo",)
KL = ("algorithm.kl_in=loss", "algorithm.kl_coef=0.1")
FAR = ("actor.lr=0.1", "actor.ppo_epochs=2")  # the policy leaves the one that sampled
ENTROPY = "algorithm.entropy_ctrl"
ADAPTIVE_ENTROPY = (
    *FAR,
    f"{ENTROPY}={{type: adaptive, target_entropy: 9, max_coef: 0.9}}",
    "algorithm.entropy_coef=0.1",
)
DROPPED = ("algorithm.policy_loss=clip_cov", "algorithm.clip_cov={clip_cov_ratio: 0.3, clip_cov_lb: 0}")
CORRECTION = "algorithm.rollout_correction"
WEIGHED = (*FAR, f"{CORRECTION}.loss_type=reinforce", f"{CORRECTION}.rollout_is=token")
REJECTED = (*FAR, f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=1.01")
SAMPLED = ("rollout.val_kwargs.do_sample=true",)
VAL = "rollout.val_kwargs"
STEPS = ("train.num_steps=4", "train.batch_size=2", "train.minibatch_size=null", "rollout.max_num_seqs=6",
         "rollout.response_length=40")  # fmt: skip
OVER = (*STEPS, "rollout.over_sample_rate=1")
NARROW = ("rollout.max_num_batched_tokens=13",)
SINGLE = ("rollout.n=1", "algorithm.singleton_group=reward")
EXACT = ("reward.functions=[{name: exact_match}]", "algorithm.dynamic_sampling=true", "algorithm.max_sampling_rounds=2")
LONG = ("algorithm.overlong.buffer_length=7",)
REPLAY = ("actor.router_replay=rollout", "rollout.enable_rollout_routing_replay=true")
RUN = (
    "train={num_steps: 3, eval_interval: 1}",
    "checkpoint={interval: 1, keep_last: 2, keep_best: 1, best_metric: val/reward/mean}",
    "observe.num_samples=1",
)
STOPPING = (*RUN, "train.early_stopping={patience: 2, metric: val/reward/mean}")

ROWS = {
    "run.seed": row("run.seed=4"),
    "run.resume": row("run.resume=must", refused="has no checkpoint"),
    "run.num_threads": row("run.num_threads=2"),
    "run.max_time_s": row("run.max_time_s=1000", by=bounds),
    "run.stop_timeout_s": row("run.stop_timeout_s=7", by=bounds),
    "run.term_timeout_s": row("run.term_timeout_s=7", by=bounds),
    "train.num_steps": row("train.num_steps=2"),
    "train.num_epochs": row("train.num_epochs=0.5", given=("train.num_steps=2",)),
    "train.batch_size": row("train.batch_size=2"),
    "train.minibatch_size": row("train.minibatch_size=4"),
    "train.critic_warmup": row("train.critic_warmup=1", given=(*PPO, "train.num_steps=2")),
    "train.mode": row("train.mode=async", given=("train.num_steps=2",)),
    "train.max_off_policy_steps": row("train.max_off_policy_steps=2", given=("train.mode=async", "train.num_steps=4")),
    "train.eval_interval": row("train.eval_interval=2", given=RUN, by=files),
    "train.early_stopping.patience": row("train.early_stopping.patience=2", given=RUN, by=files),
    "train.early_stopping.metric": row("train.early_stopping.metric=val/accuracy", given=STOPPING, by=files),
    "train.early_stopping.mode": row("train.early_stopping.mode=min", given=STOPPING, by=files),
    "train.early_stopping.min_delta": row("train.early_stopping.min_delta=1", given=STOPPING, by=files),
    "train.warm_start.num_steps": row(*WARM),
    "train.warm_start.batch_size": row("train.warm_start.batch_size=3", given=WARM),
    "train.warm_start.lr": row("train.warm_start.lr=0.1", given=WARM),
    "train.warm_start.lr_warmup_steps": row("train.warm_start.lr_warmup_steps=2", given=WARM),
    "model.path": row("model.preset=null", "model.overrides={}", "model.path=nowhere", refused="nowhere"),
    "model.preset": row("model.preset=llama_tiny"),
    "model.overrides": row("model.overrides.intermediate_size=32"),
    "model.tokenizer": row("model.tokenizer=char:0123456789<>+#x"),
    "model.dtype": row("model.dtype=bfloat16"),
    TP: row(f"{TP}=2", by=laid),
    PP: row(f"{PP}=2", given=DEEP, by=laid),
    "parallel.virtual_pipeline_model_parallel_size": row(
        "parallel.virtual_pipeline_model_parallel_size=2", given=(*DEEP, f"{PP}=2"), by=laid
    ),
    "parallel.sequence_parallel": row("parallel.sequence_parallel=true", given=(f"{TP}=2",), by=laid),
    "parallel.context_parallel_size": row("parallel.context_parallel_size=2", by=laid),
    "parallel.expert_model_parallel_size": row("parallel.expert_model_parallel_size=2", given=MIXTURE, by=laid),
    "parallel.expert_tensor_parallel_size": row("parallel.expert_tensor_parallel_size=1", given=SHARED, by=laid),
    "parallel.num_layers_in_first_pipeline_stage": row(
        "parallel.num_layers_in_first_pipeline_stage=1", given=(*DEEP, f"{PP}=2"), by=laid
    ),
    "parallel.num_layers_in_last_pipeline_stage": row(
        "parallel.num_layers_in_last_pipeline_stage=1", given=(*DEEP, f"{PP}=2"), by=laid
    ),
    "actor.ppo_epochs": row("actor.ppo_epochs=2"),
    "actor.lr": row("actor.lr=0.02"),
    "actor.min_lr": row("actor.min_lr=0.001", given=("actor.lr_schedule=linear",)),
    "actor.lr_schedule": row("actor.lr_schedule=linear"),
    "actor.lr_warmup_steps": row("actor.lr_warmup_steps=2"),
    "actor.lr_warmup_frac": row("actor.lr_warmup_frac=1.0"),
    "actor.lr_decay_frac": row("actor.lr_decay_frac=1.0", given=("actor.lr_schedule=wsd",)),
    "actor.weight_decay": row("actor.weight_decay=0.5"),
    **{f"actor.adam_beta{i}": row(f"actor.adam_beta{i}=0.5", given=("actor.ppo_epochs=2",)) for i in (1, 2)},
    "actor.adam_eps": row("actor.adam_eps=0.1"),
    "actor.clip_grad": row("actor.clip_grad=0.0001", given=("actor.adam_eps=0.1",)),
    "actor.max_tokens_per_microbatch": row("actor.max_tokens_per_microbatch=20"),
    "actor.use_prefix_grouper": row("actor.use_prefix_grouper=false"),
    "actor.transformer_impl": row(
        "actor.transformer_impl=te", given=("model.dtype=bfloat16",), refused="cannot be used: the run is on a CPU"
    ),
    "actor.use_distributed_optimizer": row("actor.use_distributed_optimizer=false"),
    "actor.overlap_grad_reduce": row("actor.overlap_grad_reduce=true"),
    **{f"actor.{part}_offload": row(f"actor.{part}_offload=true") for part in ("param", "grad", "optimizer")},
    "actor.recompute": row("actor.recompute=full"),
    "actor.logprob_chunk_tokens": row("actor.logprob_chunk_tokens=2"),
    "actor.moe_token_dispatcher_type": row("actor.moe_token_dispatcher_type=allgather", given=MIXTURE),
    "actor.moe_router_dtype": row("actor.moe_router_dtype=fp64", given=MIXTURE),
    "actor.moe_router_bias_update_rate": row("actor.moe_router_bias_update_rate=0.3", given=BIASED),
    "actor.moe_router_load_balancing_type": row(
        "actor.moe_router_load_balancing_type=aux_loss", "actor.moe_aux_loss_coeff=0.1", given=MIXTURE
    ),
    "actor.moe_aux_loss_coeff": row(
        "actor.moe_aux_loss_coeff=0.2",
        given=(*MIXTURE, "actor.moe_router_load_balancing_type=aux_loss", "actor.moe_aux_loss_coeff=0.1"),
    ),
    "actor.moe_z_loss_coeff": row("actor.moe_z_loss_coeff=0.1", given=MIXTURE),
    "actor.router_replay": row(*REPLAY, given=MIXTURE),
    "actor.lora.rank": row("actor.lora.rank=4"),
    **{f"actor.lora.{key}": row(f"actor.lora.{key}={value}", given=LORA) for key, value in (
        ("alpha", 64), ("use_rslora", "true"), ("target_modules", "[q_proj]"), ("exclude_modules", "[q_proj]"),
        ("init", "gaussian"), ("dtype", "bfloat16"), ("loraplus_lr_ratio", 4))},
    "actor.lora.share_expert_adapters": row(
        "actor.lora.share_expert_adapters=true", given=(*MIXTURE, *LORA)
    ),
    "actor.lora.adapter_path": row("actor.lora.adapter_path=nowhere", given=LORA, refused="nowhere"),
    "actor.lora.merge": row("actor.lora.merge=false", given=LORA),
    "critic.lora.rank": row("critic.lora.rank=4", given=(*PPO, *LORA)),
    **{f"critic.lora.{key}": row(f"critic.lora.{key}={value}", given=CRITIC_LORA) for key, value in (
        ("alpha", 64), ("use_rslora", "true"), ("target_modules", "[q_proj]"), ("exclude_modules", "[q_proj]"),
        ("init", "gaussian"), ("dtype", "bfloat16"), ("loraplus_lr_ratio", 4))},
    "critic.lora.share_expert_adapters": row(
        "critic.lora.share_expert_adapters=true", given=(*MIXTURE, *CRITIC_LORA)
    ),
    "critic.lora.adapter_path": row("critic.lora.adapter_path=nowhere", given=CRITIC_LORA, refused="nowhere"),
    "critic.path": row("critic.path=nowhere", given=PPO, refused="nowhere"),
    "critic.ppo_epochs": row("critic.ppo_epochs=2", given=PPO),
    "critic.cliprange_value": row("critic.cliprange_value=1e-6", given=(*PPO, "critic.lr=1e-4")),
    "critic.loss_aggregation": row("critic.loss_aggregation=seq_mean_token_mean", given=PPO),
    "critic.lr": row("critic.lr=0.02", given=PPO),
    "critic.min_lr": row("critic.min_lr=0.000001", given=(*PPO, "critic.lr_schedule=linear")),
    "critic.lr_schedule": row("critic.lr_schedule=linear", given=PPO),
    "critic.lr_warmup_steps": row("critic.lr_warmup_steps=2", given=PPO),
    "critic.lr_warmup_frac": row("critic.lr_warmup_frac=1.0", given=PPO),
    "critic.lr_decay_frac": row("critic.lr_decay_frac=1.0", given=(*PPO, "critic.lr_schedule=wsd")),
    "critic.weight_decay": row("critic.weight_decay=0.5", given=(*PPO, "critic.lr=0.1")),
    **{f"critic.adam_beta{i}": row(f"critic.adam_beta{i}=0.5", given=(*PPO, "critic.ppo_epochs=2")) for i in (1, 2)},
    "critic.adam_eps": row("critic.adam_eps=0.1", given=PPO),
    "critic.clip_grad": row("critic.clip_grad=0.0001", given=(*PPO, "critic.adam_eps=0.1")),
    **{f"critic.{part}_offload": row(f"critic.{part}_offload=true", given=PPO)
       for part in ("param", "grad", "optimizer")},
    "megatron.transformer": row("megatron.transformer.bias_dropout_fusion=true", by=laid),
    "megatron.ddp": row("megatron.ddp.grad_reduce_in_fp32=false", given=("model.dtype=bfloat16",)),
    "megatron.optimizer": row("megatron.optimizer.decoupled_weight_decay=false", given=("actor.weight_decay=0.5",)),
    "megatron.unchecked": row(
        "megatron.unchecked=false",
        given=("megatron.unchecked=true", "megatron.transformer.attention_softmax_in_fp32=false"),
        refused="it changes the softmax",
    ),
    "rollout.enable_rollout_routing_replay": row(
        "rollout.enable_rollout_routing_replay=false",
        given=(*MIXTURE, *REPLAY),
        refused="needs rollout.enable_rollout_routing_replay=true",
    ),
    **{key: row(*changed, **more) for key, (changed, more) in DISTILLATION.items()},
    "reference.update_interval": row("reference.update_interval=1", given=(*KL, "train.num_steps=2")),
    "rollout.name": row("rollout.name=nowhere", refused="rollout.name=nowhere is unknown"),
    "rollout.engine_dir": row("rollout.engine_dir=engines", refused="only rollout.name=trtllm_engine reads"),
    "rollout.n": row("rollout.n=3"),
    "rollout.temperature": row("rollout.temperature=0.5"),
    "rollout.top_k": row("rollout.top_k=2"),
    "rollout.top_p": row("rollout.top_p=0.5"),
    "rollout.min_p": row("rollout.min_p=0.95"),
    "rollout.do_sample": row("rollout.do_sample=false", given=SINGLE),
    "rollout.ignore_eos": row("rollout.ignore_eos=true"),
    "rollout.stop": row("rollout.stop=['1']"),
    "rollout.repetition_penalty": row("rollout.repetition_penalty=1.1", refused="it must be 1.0"),
    "rollout.prompt_length": row("rollout.prompt_length=6", refused="more than rollout.prompt_length=6"),
    "rollout.response_length": row("rollout.response_length=4"),
    "rollout.max_model_len": row("rollout.max_model_len=19", refused="rollout.max_model_len=19 is below"),
    "rollout.dtype": row("rollout.dtype=bfloat16"),
    "rollout.quantization": row("rollout.quantization=fp8"),
    "rollout.tensor_model_parallel_size": row("rollout.tensor_model_parallel_size=2", by=laid),
    "rollout.num_ranks": row("rollout.num_ranks=2", by=laid),
    "rollout.nnodes": row("rollout.nnodes=2", "rollout.n_gpus_per_node=1", by=laid),
    "rollout.n_gpus_per_node": row("rollout.n_gpus_per_node=2", "rollout.nnodes=1", by=laid),
    "rollout.over_sample_rate": row("rollout.over_sample_rate=1", given=STEPS),
    "rollout.over_age": row("rollout.over_age=drop", given=(*OVER, "train.max_off_policy_steps=1")),
    "rollout.mask_offpolicy": row("rollout.mask_offpolicy=true", given=OVER),
    "rollout.pipeline_model_parallel_size": row(
        "rollout.pipeline_model_parallel_size=2", by=laid, refused="only built TensorRT-LLM engines"
    ),
    "rollout.expert_parallel_size": row(
        "rollout.expert_parallel_size=2", given=(*MIXTURE, "rollout.tensor_model_parallel_size=2"), by=laid
    ),
    "rollout.moe_tensor_parallel_size": row(
        "rollout.moe_tensor_parallel_size=1", given=(*MIXTURE, "rollout.tensor_model_parallel_size=2"), by=laid,
        refused="does not make up rollout.tensor_model_parallel_size=2",
    ),
    "rollout.max_num_seqs": row("rollout.max_num_seqs=3"),
    "rollout.max_num_batched_tokens": row(*NARROW),
    "rollout.enable_chunked_prefill": row(
        "rollout.enable_chunked_prefill=false",
        given=("rollout.max_num_batched_tokens=8",),
        refused="so long prompts cannot be prefilled",
    ),
    "rollout.enable_prefix_caching": row("rollout.enable_prefix_caching=false"),
    "rollout.true_on_policy": row("rollout.true_on_policy=true"),
    "rollout.gpu_memory_utilization": row("rollout.gpu_memory_utilization=1e-9", refused="MiB for the KV cache"),
    "rollout.free_cache_engine": row("rollout.free_cache_engine=false"),
    "rollout.engine_kwargs": row(
        "rollout.engine_kwargs={trtllm: {attn_backend: FLASHINFER}}",
        refused="rollout.engine_kwargs.trtllm is refused with rollout.name=native",
    ),
    "rollout.calculate_log_probs": row("rollout.calculate_log_probs=false", refused="it must be True"),
    f"{VAL}.n": row(f"{VAL}.n=2", given=SAMPLED),
    f"{VAL}.do_sample": row(*SAMPLED),
    f"{VAL}.temperature": row(f"{VAL}.temperature=0", given=SAMPLED),
    f"{VAL}.top_k": row(f"{VAL}.top_k=2", given=SAMPLED),
    f"{VAL}.top_p": row(f"{VAL}.top_p=0.4", given=SAMPLED),
    f"{VAL}.min_p": row(f"{VAL}.min_p=0.95", given=SAMPLED),
    "rollout.checkpoint_engine.canary": row("rollout.checkpoint_engine.canary=true", given=RUN, by=files),
    "algorithm.name": row("algorithm.name=rloo"),
    "algorithm.advantage_std": row("algorithm.advantage_std=none"),
    "algorithm.advantage_eps": row("algorithm.advantage_eps=1.0"),
    "algorithm.advantage_std_over": row("algorithm.advantage_std_over=batch"),
    "algorithm.gamma": row("algorithm.gamma=0.5", given=PPO),
    "algorithm.lam": row("algorithm.lam=0.5", given=(*PPO, "critic.lr=0.1")),
    "algorithm.value_lam": row("algorithm.value_lam=0.5", given=(*PPO, "critic.lr=0.1")),
    "algorithm.lam_length_alpha": row("algorithm.lam_length_alpha=0.5", given=(*PPO, "critic.lr=0.1")),
    "algorithm.singleton_group": row("algorithm.singleton_group=zero", given=SINGLE),
    "algorithm.loss_aggregation": row("algorithm.loss_aggregation=seq_mean_token_sum"),
    "algorithm.policy_loss": row("algorithm.policy_loss=cispo"),
    **{f"algorithm.sapo.tau_{sign}": row(f"algorithm.sapo.tau_{sign}=9", given=(*FAR, "algorithm.policy_loss=sapo"))
       for sign in ("pos", "neg")},
    **{f"algorithm.vespo.{name}": row(f"algorithm.vespo.{name}=9", given=(*FAR, "algorithm.policy_loss=vespo"))
       for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    "algorithm.dro.dro_beta": row("algorithm.dro.dro_beta=9", given=(*FAR, "algorithm.policy_loss=dro")),
    **{f"algorithm.dpo.{key}": row(f"algorithm.dpo.{key}={value}", given=DPO)
       for key, value in (("loss_type", "hinge"), ("beta", 3), ("label_smoothing", 0.3), ("sft_loss_weight", 0.5))},
    "algorithm.dppo.ratio_cap": row("algorithm.dppo.ratio_cap=1.01", given=(*FAR, "algorithm.policy_loss=dppo_tv")),
    "algorithm.clip_cov.clip_cov_ratio": row("algorithm.clip_cov.clip_cov_ratio=0.9", given=DROPPED),
    "algorithm.clip_cov.clip_cov_lb": row("algorithm.clip_cov.clip_cov_lb=0.2", given=DROPPED),
    "algorithm.clip_cov.clip_cov_ub": row("algorithm.clip_cov.clip_cov_ub=0.001", given=DROPPED),
    **{f"algorithm.kl_cov.{key}": row(f"algorithm.kl_cov.{key}=0.9", given=(*FAR, "algorithm.policy_loss=kl_cov"))
       for key in ("kl_cov_ratio", "ppo_kl_coef")},
    "algorithm.entropy_ctrl.type": row(f"{ENTROPY}.type=adaptive", given=("algorithm.entropy_coef=0.1",)),
    **{f"{ENTROPY}.{key}": row(f"{ENTROPY}.{key}={value}", given=ADAPTIVE_ENTROPY)
       for key, value in (("target_entropy", 0.01), ("delta", 0.5), ("min_coef", 0.7), ("max_coef", 0.1))},
    "algorithm.positive_example_nll_weight": row("algorithm.positive_example_nll_weight=0.5"),
    "algorithm.top_entropy_quantile": row("algorithm.top_entropy_quantile=0.3"),
    "algorithm.loss_norm_length": row(
        "algorithm.loss_norm_length=100", given=("algorithm.loss_aggregation=seq_mean_token_sum_norm",)
    ),
    "algorithm.clip_low": row("algorithm.clip_low=0.01", given=FAR),
    "algorithm.clip_high": row("algorithm.clip_high=0.01", given=FAR),
    "algorithm.dual_clip": row("algorithm.dual_clip=1.01", given=FAR),
    "algorithm.kl_in": row(*KL),
    "algorithm.kl_coef": row("algorithm.kl_coef=0.9", given=KL),
    "algorithm.kl_ctrl.type": row("algorithm.kl_ctrl.type=adaptive", given=CHARGED),
    "algorithm.kl_ctrl.target_kl": row("algorithm.kl_ctrl.target_kl=1e-9", given=ADAPTIVE_KL),
    "algorithm.kl_ctrl.horizon": row("algorithm.kl_ctrl.horizon=5", given=ADAPTIVE_KL),
    "algorithm.kl_estimator": row("algorithm.kl_estimator=k1", given=KL),
    "algorithm.kl_unbiased": row("algorithm.kl_unbiased=true", given=(*KL, *FAR)),
    "algorithm.entropy_coef": row("algorithm.entropy_coef=0.1"),
    f"{CORRECTION}.preset": row(f"{CORRECTION}.preset=disabled"),
    f"{CORRECTION}.bypass_mode": row(f"{CORRECTION}.bypass_mode=false"),
    f"{CORRECTION}.loss_type": row(f"{CORRECTION}.loss_type=reinforce"),
    f"{CORRECTION}.rollout_is": row(f"{CORRECTION}.rollout_is=sequence", given=WEIGHED),
    f"{CORRECTION}.rollout_is_threshold": row(f"{CORRECTION}.rollout_is_threshold=0.5", given=WEIGHED),
    f"{CORRECTION}.rollout_is_batch_normalize": row(f"{CORRECTION}.rollout_is_batch_normalize=true", given=WEIGHED),
    f"{CORRECTION}.rollout_rs": row(f"{CORRECTION}.rollout_rs=token_k2", given=REJECTED),
    f"{CORRECTION}.rollout_rs_threshold": row(f"{CORRECTION}.rollout_rs_threshold=1.5", given=REJECTED),
    f"{CORRECTION}.rollout_rs_denominator": row(f"{CORRECTION}.rollout_rs_denominator=kept", given=REJECTED),
    f"{CORRECTION}.off_policy_mask_threshold": row(f"{CORRECTION}.off_policy_mask_threshold=0", given=FAR),
    "algorithm.dynamic_sampling": row(*EXACT, given=EXACT[:1]),
    "algorithm.max_sampling_rounds": row("algorithm.max_sampling_rounds=1", given=EXACT),
    "algorithm.overlong.buffer_length": row(*LONG),
    "algorithm.overlong.penalty": row("algorithm.overlong.penalty=3", given=LONG),
    "algorithm.overlong.mask_truncated": row("algorithm.overlong.mask_truncated=true"),
    "reward.functions": row("reward.functions=[{name: length, kwargs: {target: 2, limit: 8}}]"),
    "reward.functions[].name": row("reward.functions[0].name=math"),
    "reward.functions[].weight": row("reward.functions[1].weight=0.2"),
    "reward.functions[].kwargs": row("reward.functions[1].kwargs.target=4"),
    **{key: row(*changed, given=given, by=read, refused=refused) for key, (changed, given, refused) in COLUMNS.items()},
    "data.train_on_turns": row("data.train_on_turns=last", given=TALKS),
    "checkpoint.interval": row("checkpoint.interval=0", given=RUN, by=files),
    "checkpoint.keep_last": row("checkpoint.keep_last=1", given=RUN, by=files),
    "checkpoint.keep_best": row("checkpoint.keep_best=4", given=RUN, by=files),
    "checkpoint.best_metric": row("checkpoint.best_metric=val/response_length/mean", given=RUN, by=files),
    "checkpoint.export_hf": row("checkpoint.export_hf=true", given=RUN, by=files),
    "observe.console": row("observe.console=plain", given=RUN, by=files),
    "observe.num_samples": row("observe.num_samples=0", given=RUN, by=files),
    "observe.tensorboard": row("observe.tensorboard=true", given=RUN, by=files),
    "observe.report": row("observe.report=true", given=RUN, by=files),
}  # fmt: skip

EPISODES = ("rollout/episodes/test_episodes.py", "needs an environment in processes of its own")

ELSEWHERE = {
    # where it is observed, and why not by a short run in this process
    "run.output_dir": ("checkpoint/run_dir/test_run_dir.py", "every run of this test has a folder of its own"),
    "run.device": ("test_bad_input.py", "what there is besides a CPU depends on the machine"),
    "run.collective_timeout_s": ("launch/test_survival.py", "needs ranks that wait for one that hangs"),
    "run.heartbeat_timeout_s": ("launch/test_survival.py", "needs a rank that stands still"),
    "reference.path": ("e2e/test_resume.py", "needs a second model"),
    "checkpoint.async_save": ("e2e/test_async_checkpoint.py", "the files are the same, whoever writes them"),
    "rollout.enforce_eager": ("engines/trtllm/test_fields.py", "CUDA graphs are on a GPU only: gpu/ when one is lent"),
    "rollout.multi_turn.enable": EPISODES,
    "rollout.multi_turn.max_assistant_turns": EPISODES,
    "rollout.multi_turn.max_user_turns": EPISODES,
    "rollout.multi_turn.max_parallel_calls": EPISODES,
    "rollout.multi_turn.max_tool_response_length": EPISODES,
    "rollout.multi_turn.tool_response_truncate_side": EPISODES,
    "rollout.multi_turn.format": EPISODES,
    "rollout.multi_turn.tokenization_sanity_check_mode": EPISODES,
    "rollout.agent.environment": EPISODES,
    "rollout.agent.environment_kwargs": EPISODES,
    "rollout.agent.num_workers": EPISODES,
    "rollout.agent.time_limit_s": EPISODES,
    "rollout.agent.memory_limit_mb": EPISODES,
    "rollout.checkpoint_engine.update_weights_bucket_megabytes": (
        "resharding/test_weight_sync.py",
        "a small model fits one",
    ),
    **{
        f"rollout.speculative.{name}": ("engines/native/test_speculation.py", "how fast tokens come, never which ones")
        for name in ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
    },
    "algorithm.credit": ("rollout/test_turn_credit.py", "needs an environment in processes of its own"),
    "reward.functions[].batch": ("rewards/test_batches.py", "needs a function of lists, in a process of its own"),
    "reward.model.path": ("e2e/test_reward_model.py", "needs a second model"),
    "reward.model.weight": ("e2e/test_reward_model.py", "needs a second model"),
    "reward.model.retokenize": ("trainer/test_reward_model.py", "needs a model with another tokenizer"),
    "reward.time_limit_s": ("rewards/test_scorer.py", "needs a function that hangs, in a process of its own"),
    "reward.num_workers": ("rewards/test_scorer.py", "needs functions in processes of their own"),
    "reward.error_value": ("rewards/test_scorer.py", "needs a function that fails"),
    "reward.max_failed_frac": ("rewards/test_scorer.py", "needs a function that fails"),
    "reward.cache_mb": ("rewards/test_cache.py", "saves work and changes no number"),
    "reward.memory_limit_mb": ("rewards/test_scorer.py", "needs a function that takes too much"),
    **{
        f"observe.wandb_{name}": ("observability/loggers/test_wandb.py", "needs the extra package")
        for name in ("name", "group", "tags")
    },
    "observe.wandb_project": ("observability/loggers/test_wandb.py", "needs the extra package"),
    "observe.loggers": ("observability/test_run_log.py", "needs a class of the user's"),
    "observe.callbacks": ("e2e/test_objects.py", "needs a class of the user's"),
}

ENTRIES = {"reward.functions": RewardFunctionConfig, "distillation.teacher_models": TeacherConfig}
KEYS = [*dotted_keys(Config), *(f"{key}[].{name}" for key, kind in ENTRIES.items() for name in dotted_keys(kind))]


def test_every_field_is_observed_here_or_says_where():
    assert sorted([*ROWS, *ELSEWHERE]) == sorted(KEYS)


@pytest.mark.parametrize("key", ELSEWHERE)
def test_what_is_observed_elsewhere_is_there(key):
    file, _ = ELSEWHERE[key]
    assert key.rpartition(".")[2] in (ROOT / "tests" / file).read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows, a tokenizer and a template that overrides name as {folder}."""
    return write(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.compiler) if key == "rollout.true_on_policy" else key for key in ROWS]
)
def test_a_field_changes_something(key, folder):
    one = ROWS[key]
    given, changed = (
        tuple(item.replace("{folder}", str(folder)) for item in items) for items in (one.given, one.changed)
    )
    before, after = one.by(*given), one.by(*given, *changed)
    assert "refused" not in before, before
    assert one.refused in after.get("refused", "")
    assert bool(one.refused) == ("refused" in after), after
    assert after != before


def test_a_course_depends_on_its_config_alone():
    """Otherwise the fields would pass by chance."""
    again = course.__wrapped__  # not from the cache
    assert again() == course()
