"""Classification of each field of Megatron's configuration (megatron-core 0.16.1 to 0.19.2).

- DERIVED: follows from another key, or from mrl's design; refused, and the message names the key.
- MODEL: changes the model, so that the engine would sample from another one; refused except for mrl's own value.
- GUARDED: has a precondition (`trainer/validation/megatron.py`), or needs code that mrl lacks.
- FREE: passed through.

Tests compare the table with the fields of these versions and of the installed one; `versions.py` says which version has
which field.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mrl.config.megatron_fields.installed import fields_of
from mrl.config.megatron_fields.values import DTYPES, names_dtype

FieldKind = Literal["derived", "model", "guarded", "free"]
Rows = dict[str, dict[str, str]]
"""Section -> field names, separated by spaces -> reason or rule."""

DERIVED: Rows = {
    "transformer": {
        "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
        "sequence_parallel context_parallel_size expert_model_parallel_size expert_tensor_parallel_size "
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage": "set parallel.{name}",
        "moe_extended_tp": "set parallel.expert_tensor_parallel_size",
        "gtp_weight_remat_size expert_gtp_weight_remat_size tensor_parallel_num_weight_shards "
        "expert_tensor_parallel_num_weight_shards": (
            "set parallel.tensor_model_parallel_size; weight sync and checkpoints know no other cut of a weight"
        ),
        "moe_grad_scale_func mtp_grad_scale_func experimental_attention_variant_loss_scale_func": (
            "it is a function, which mrl sets itself"
        ),
        "moe_router_quantile_balancing_ema": "set actor.moe_router_load_balancing_type",
        "pipeline_model_parallel_layout account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
        "mtp_standalone": "set parallel.num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage",
        "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels layernorm_epsilon "
        "qk_layernorm add_qkv_bias num_moe_experts moe_router_topk moe_ffn_hidden_size moe_router_pre_softmax "
        "moe_shared_expert_intermediate_size moe_shared_expert_gate activation_func use_fused_weighted_squared_relu": (
            "it comes from model.path, or model.preset and model.overrides"
        ),
        "fp16 bf16 params_dtype pipeline_dtype enable_autocast autocast_dtype": "set model.dtype",
        "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_router_dtype "
        "moe_token_dispatcher_type moe_router_bias_update_rate": "set actor.{name}",
        "moe_enable_deepep": "set actor.moe_token_dispatcher_type=flex; its moe_flex_dispatcher_backend is deepep",
        "moe_enable_routing_replay": "set actor.router_replay",
        "transformer_impl": "set actor.{name}",
        "moe_grouped_gemm": "experts are grouped with TransformerEngine's layers",
        "use_cpu_initialization": "set run.device",
        "perform_initialization init_method output_layer_init_method embedding_init_method init_method_std "
        "embedding_init_method_std init_model_with_meta_device": (
            "weights are read from model.path, or initialized by mrl for model.preset"
        ),
        "timers barrier_with_L1_time": "mrl has its own timers: timing_s/* in the metrics",
        "config_logger_dir": "the run folder's config.yaml contains the config",
        "moe_per_layer_logging": "the metrics actor/moe_* are over all layers",
        "finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func "
        "_cpu_offloading_context": "it is a function, which mrl sets itself",
        "calculate_per_token_loss": "losses are sums over tokens: algorithm.loss_aggregation sets their divisor",
        "cross_entropy_loss_fusion cross_entropy_fusion_impl": (
            "mrl computes log-probabilities itself: actor.logprob_chunk_tokens"
        ),
        "variable_seq_lengths max_seqlen_per_dp_cp_rank hybrid_context_parallel": (
            "mrl packs sequences: actor.max_tokens_per_microbatch"
        ),
        "overlap_p2p_comm batch_p2p_comm": "follows from parallel.virtual_pipeline_model_parallel_size",
        "hetereogenous_dist_checkpoint": "a checkpoint of mrl loads at any layout",
        "log_max_attention_logit test_mode async_tensor_model_parallel_allreduce persist_layer_norm "
        "memory_efficient_layer_norm masked_softmax_fusion": "it would have no effect: mrl's layers do not read it",
    },
    "ddp": {
        "overlap_grad_reduce use_distributed_optimizer": "set actor.{name}",
        "average_in_collective gradient_reduce_div_fusion": "losses are sums: gradients are added, never averaged",
    },
    "optimizer": {
        "lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad use_distributed_optimizer": (
            "set actor.{name}"
        ),
        "fp16 bf16 params_dtype": "set model.dtype",
        "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis": (
            "it would have no effect: model.dtype is never float16"
        ),
        "overlap_param_gather": "set megatron.ddp.overlap_param_gather",
        "log_num_zeros_in_grad config_logger_dir": "mrl reports its own metrics",
        "timers barrier_with_L1_time": "mrl has its own timers: timing_s/* in the metrics",
    },
}
"""Reason for each derived field; {name} is the field's name."""

MODEL: Rows = {
    "transformer": {
        "mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer mtp_hybrid_override_pattern mtp_detach_heads": (
            "multi-token prediction"
        ),
        "use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim "
        "mup_attn_scale_power": "the scale of its layers",
        "softmax_scale softmax_type attention_softmax_in_fp32 apply_query_key_layer_scaling": "the softmax",
        "hidden_dropout attention_dropout": "dropout, which the engine lacks",
        "fp32_residual_connection apply_residual_connection_post_layernorm": "the residual",
        "layernorm_zero_centered_gamma normalization qk_l2_norm": "the norms",
        "add_bias_linear gated_linear_unit glu_linear_offset activation_func_clamp_value": "the MLP",
        "rotary_interleaved no_rope_freq mrope_section": "the rotary embedding",
        "window_size window_attn_skip_freq attention_output_gate multi_latent_attention "
        "dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_kernel_backend dsa_indexer_rope_interleaved "
        "dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 "
        "experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk "
        "dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim "
        "linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads": "the attention",
        "moe_layer_freq moe_latent_size heterogeneous_block_specs": "the layer types",
        "moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor "
        "moe_router_score_function moe_router_enable_expert_bias "
        "moe_router_force_load_balancing moe_input_jitter_eps moe_token_dropping moe_expert_capacity_factor "
        "moe_router_force_biased moe_pad_expert_input_to_capacity moe_token_drop_policy moe_apply_probs_on_input": (
            "the routing"
        ),
        "is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path "
        "mamba_training_ssm_states_dtype": "the Mamba layers",
    },
    "ddp": {},
    "optimizer": {},
}
"""Part of the model that each field would change."""

MRL_DEFAULTS: dict[tuple[str, str], Any] = {
    ("transformer", "hidden_dropout"): 0.0,
    ("transformer", "attention_dropout"): 0.0,
    ("transformer", "normalization"): "RMSNorm",
    ("transformer", "add_bias_linear"): False,
    ("transformer", "gated_linear_unit"): True,
    ("transformer", "deallocate_pipeline_outputs"): True,
    ("transformer", "batch_p2p_sync"): False,
    ("ddp", "grad_reduce_in_fp32"): True,
    ("optimizer", "optimizer"): "adam",
    ("optimizer", "decoupled_weight_decay"): True,
    ("optimizer", "optimizer_offload_fraction"): 1.0,
}
"""mrl's value of fields that may be set, where it differs from Megatron's default."""

_ONE_LENGTH = "it needs microbatches of one length; mrl packs sequences to different ones"
_SCHEDULE = "it needs a pipeline schedule that mrl does not use"
_LOW_WEIGHTS = "weight sync and checkpoints read unquantized bfloat16 or float32 weights"
_DELAYED = (
    "it belongs to fp8_recipe: delayed, which mrl refuses because its history of magnitudes is state that a resume "
    "would lose and that scoring would change"
)
_QUANTIZERS = "no engine has its number format, so it would sample with other weights than the actor computes with"
_FSDP = (
    "Megatron-FSDP shards every parameter over ranks, but weight sync, checkpoints and offloading read unsharded ones"
)
_INFERENCE = "it belongs to Megatron's inference; mrl samples with an engine (rollout.name)"
_CALLED = "it needs a call after each step that mrl does not make"

LACKING: Rows = {
    "transformer": {
        "pipeline_model_parallel_comm_backend": "mrl creates the process groups, for gloo and NCCL",
        "hierarchical_context_parallel_sizes": "mrl creates the process groups, without a hierarchy",
        "num_microbatches_with_partial_activation_checkpoints overlap_moe_expert_parallel_comm delay_wgrad_compute "
        "ep_overlap_early_attn_memory_release overlap_dispatch_backward_with_experts_wgrad "
        "high_priority_a2a_comm_stream": _SCHEDULE,
        "tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs "
        "tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs "
        "tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend": _ONE_LENGTH,
        "use_te_rng_tracker enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope "
        "cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps cuda_graph_modules "
        "delay_offload_until_cuda_graph moe_expert_rank_capacity_factor moe_paged_stash moe_paged_stash_page_size "
        "moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu moe_ncclep_static_shape "
        "moe_ncclep_zero_copy": _ONE_LENGTH,
        "use_ring_exchange_p2p": "it needs a torch that was built with ring exchange",
        "defer_embedding_wgrad_compute wgrad_deferral_limit": (
            "the output layer is not called as a module: mrl computes log-probabilities from its weight"
        ),
        "qk_clip qk_clip_alpha qk_clip_threshold": _CALLED,
        "fp8_param fp4_param": _LOW_WEIGHTS,
        "fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo tp_only_amax_red fp8_wgrad": _DELAYED,
        "fp8_quantizer_factory use_kitchen use_kitchen_attention kitchen_attention_backend fp4 fp4_recipe "
        "fp4_quantizer_factory quant_recipe": _QUANTIZERS,
        "fp8_dot_product_attention fp8_multi_head_attention": (
            "attention over packed sequences with shared prefixes is computed in bfloat16"
        ),
        "moe_router_padding_for_quantization moe_router_padding_for_fp8": (
            "TransformerEngine's grouped experts pad their rows themselves, and padded routings could not be replayed"
        ),
        "activation_func_fp8_input_store": "the gradient of the activation would be that of rounded inputs",
        "disable_parameter_transpose_cache": "mrl keeps TransformerEngine's own choice of what an FP8 layer stores",
        "fp8_output_proj": "mrl computes log-probabilities itself, in model.dtype, from the output layer's weight",
        "moe_use_legacy_grouped_gemm": "weight sync and checkpoints support only TransformerEngine's grouped experts",
        "flash_decode use_inference_optimized_layers inference_fuse_tp_communication inference_rng_tracker "
        "inference_sampling_seed mlp_chunks_for_prefill symmetric_ar_type moe_pad_experts_for_cuda_graph_inference "
        "nccl_all_reduce_for_prefill inference_disable_triton_nvls_kernels inference_grouped_gemm_backend "
        "inference_moe_disable_fused_quant_kernels inference_cuda_graph_scope inference_moe_token_dispatcher_type": (
            _INFERENCE
        ),
        "moe_single_grouped_weight moe_single_grouped_bias use_grouped_gemm_for_dense_mlp "
        "use_grouped_gemm_for_shared_expert moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size "
        "use_transformer_engine_op_fuser": "weight sync and checkpoints know the layers' weights in another form only",
        "batch_invariant_mode": "its kernels need GPUs, and no engine has them; on a CPU: rollout.true_on_policy",
        "fused_single_qkv_rope": "Megatron supports it only for unpacked sequences",
        "moe_layer_recompute": "Megatron replaced it: recompute_granularity=selective, recompute_modules=[moe]",
    },
    "ddp": {
        "num_distributed_optimizer_instances": "mrl creates the process groups, and optimizer shards span all dp ranks",
        "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache fp4_param_gather": _LOW_WEIGHTS,
        "param_name_patterns_for_fp32_local_accumulation": "grad_reduce_in_fp32: true does so for all parameters",
        "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy suggested_communication_unit_size "
        "preserve_fp32_weights fsdp_double_buffer outer_dp_sharding_strategy fsdp_manual_registration "
        "fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync megatron_fsdp_main_params_dtype "
        "megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype megatron_fsdp_use_decoupled_grad "
        "megatron_fsdp_cuda_graph_mode megatron_fsdp_enable_fine_grained_param_gather "
        "megatron_fsdp_max_pool_double_buffer": _FSDP,
        "delay_wgrad_compute": _SCHEDULE,
    },
    "optimizer": {
        "decoupled_lr decoupled_min_lr": "mrl sets one learning rate for all parameters",
        "optimizer sgd_momentum muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode "
        "muon_fp32_matmul_prec muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_nesterov "
        "muon_coefficient_type muon_scalar_optimizer lion_beta1 lion_beta2 soap_shampoo_beta "
        "soap_precondition_frequency soap_use_kl_shampoo adaptive_muon_moment2_method adaptive_muon_beta2 "
        "adaptive_muon_eps use_layer_wise_distributed_optimizer": (
            "checkpoints contain Adam's moments: the optimizer is adam"
        ),
        "fp8_recipe reuse_grad_buf_for_mxfp8_param_ag": _LOW_WEIGHTS,
        "overlap_param_gather_with_optimizer_step": _SCHEDULE,
        "use_torch_optimizer_for_cpu_offload": "it would have no effect: torch's AdamW runs on the host anyway",
        "optimizer_cuda_graph": "the learning rate and the number of steps change outside a graph",
        "pin_cpu_params": "it would have no effect: Megatron never reads it",
    },
}
"""Guarded fields that mrl never allows -> what mrl lacks for them."""

RULE_CHECKED: Rows = {
    "transformer": {
        "attention_backend": "attention",
        "apply_rope_fusion": "rope_fusion",
        "moe_permute_fusion gradient_accumulation_fusion use_te_activation_func "
        "fused_residual_rmsnorm flash_attention_version": "te",
        "moe_router_fusion": "router_fusion",
        "cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights "
        "cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers": "activation_offload",
        "fine_grained_activation_offloading offload_modules min_offloaded_tensor_size "
        "fine_grained_offloading_max_inflight_offloads delta_offload_bytes_across_pp_ranks "
        "activation_offload_fraction": "fine_offload",
        "recompute_granularity recompute_method recompute_num_layers recompute_modules distribute_saved_activations": (
            "recompute"
        ),
        "moe_shared_expert_overlap": "shared_overlap",
        "moe_flex_dispatcher_backend": "flex_backend",
        "moe_deepep_num_sms moe_hybridep_num_sms moe_flex_dispatcher_num_sms": "flex",
        "moe_permute_fusion_into_hybridep moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute "
        "moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs": "hybridep",
        "mlp_chunks_for_training": "mlp_chunks",
        "fp8": "fp8",
        "fp8_recipe": "with_fp8",
        "first_last_layers_bf16": "plain_layers",
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16": "num_plain_layers",
        "cp_comm_type": "context",
        "overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage": "interleaved",
        "batch_p2p_sync deallocate_pipeline_outputs": "pipeline",
    },
    "ddp": {
        "overlap_param_gather": "param_gather",
        "align_param_gather": "aligned",
        "bucket_size": "buckets",
        "num_buckets": "bucket_count",
        "pad_buckets_for_high_nccl_busbw": "distributed",
        "reduce_scatter_with_fp32_accumulation": "low_gradients",
        "grad_reduce_in_fp32": "gradients",
        "nccl_ub": "registered",
        "disable_symmetric_registration": "symmetric",
    },
    "optimizer": {
        "use_precision_aware_optimizer": "precision",
        "store_param_remainders": "remainders",
        "main_params_dtype": "masters",
        "main_grads_dtype": "main_gradients",
        "exp_avg_dtype exp_avg_sq_dtype": "moments",
        "optimizer_cpu_offload": "hybrid",
        "optimizer_offload_fraction": "fraction",
        "overlap_cpu_optimizer_d2h_h2d": "hybrid_overlap",
        "pin_cpu_grads": "of_hybrid",
        "apply_wd_to_qk_layernorm": "qk_norm",
        "grad_norm_skip_threshold": "skip",
    },
}
"""Guarded fields -> rule of `trainer/validation/megatron.py` that decides whether the value is allowed."""

FREE: dict[str, str] = {
    "transformer": "deterministic_mode disable_bf16_reduced_precision_matmul bias_activation_fusion "
    "bias_dropout_fusion clone_scatter_output_in_embedding",
    "ddp": "check_for_nan_in_grad check_for_large_grads",
    "optimizer": "decoupled_weight_decay",
}

TE_ONLY: dict[str, str] = {
    "transformer": "attention_backend apply_rope_fusion moe_permute_fusion moe_router_fusion "
    "gradient_accumulation_fusion use_te_activation_func cpu_offloading cpu_offloading_num_layers "
    "cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering "
    "fine_grained_activation_offloading offload_modules min_offloaded_tensor_size moe_shared_expert_overlap "
    "moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms cp_comm_type fused_residual_rmsnorm "
    "flash_attention_version cpu_offloading_retain_pinned_cpu_buffers fine_grained_offloading_max_inflight_offloads "
    "delta_offload_bytes_across_pp_ranks activation_offload_fraction moe_permute_fusion_into_hybridep "
    "moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing "
    "moe_hybridep_pad_uneven_dispatch_inputs moe_flex_dispatcher_num_sms",
    "ddp": "nccl_ub disable_symmetric_registration",
    "optimizer": "use_precision_aware_optimizer store_param_remainders main_grads_dtype main_params_dtype "
    "exp_avg_dtype exp_avg_sq_dtype",
}
"""Fields that need TransformerEngine on GPUs; a run without it is refused, and a rehearsal drops them."""


def te_only(section: str, name: str) -> bool:
    """Returns whether a field needs TransformerEngine."""
    return name in TE_ONLY[section].split()


def default_value(section: str, name: str) -> Any:
    """Returns the value of a field that the config does not set: mrl's, else Megatron's default."""
    return MRL_DEFAULTS.get((section, name), fields_of(section)[name].default)


def is_default(section: str, name: str, value: Any) -> bool:
    """Returns whether setting a field to this value changes nothing."""
    own = default_value(section, name)
    if isinstance(value, str) and names_dtype(fields_of(section)[name].kind):
        value = DTYPES.get(value, value)
    return type(own) is type(value) and bool(own == value)


@dataclass(frozen=True)
class Verdict:
    """Classification of a field.

    Attributes:
        kind: "derived", "model", "guarded" or "free".
        why: Reason for the refusal; "" if a rule supplies it, or if the field is free.
        rule: Name of the rule that decides about a guarded field; "" if it is always refused.
    """

    kind: FieldKind
    why: str = ""
    rule: str = ""


def verdicts() -> Iterator[tuple[str, str, Verdict]]:
    """Yields every row of the table as (section, field, verdict); a field in two classes appears twice."""
    for section in DERIVED:
        for name, why in _opened(DERIVED[section]):
            yield section, name, Verdict("derived", why.format(name=name))
        for name, why in _opened(MODEL[section]):
            yield section, name, Verdict("model", f"the engine would sample from another model: it changes {why}")
        for name, why in _opened(LACKING[section]):
            yield section, name, Verdict("guarded", why)
        for name, rule in _opened(RULE_CHECKED[section]):
            yield section, name, Verdict("guarded", rule=rule)
        for name in FREE[section].split():
            yield section, name, Verdict("free")


def _opened(rows: dict[str, str]) -> Iterator[tuple[str, str]]:
    for names, said in rows.items():
        for name in names.split():
            yield name, said


TABLE: dict[tuple[str, str], Verdict] = {(section, name): verdict for section, name, verdict in verdicts()}
