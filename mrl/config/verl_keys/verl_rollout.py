"""Verdicts on every field of verl's RolloutConfig (`verl.workers.config.RolloutConfig` of 0.9.1).

A field has a key of mrl, or is refused with the reason and mrl's alternative. Fields of nested sections are written
with a dot; `translated_keys.py` has the rest of verl's trainer config. Imports nothing of mrl.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SAME = {
    "temperature": 1.0, "top_k": -1, "top_p": 1, "do_sample": True, "n": 1,
    "ignore_eos": False, "enforce_eager": False, "free_cache_engine": True, "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1, "max_num_batched_tokens": 8192, "val_kwargs.temperature": 0,
    "val_kwargs.top_k": -1, "val_kwargs.top_p": 1.0, "val_kwargs.do_sample": False, "val_kwargs.n": 1,
    "max_model_len": None, "max_num_seqs": 256, "checkpoint_engine.update_weights_bucket_megabytes": 2048,
    "enable_chunked_prefill": True, "enable_prefix_caching": True, "enable_rollout_routing_replay": False,
}  # fmt: skip
MAPS: Mapping[str, tuple[str, Any, str]] = {
    "name": (
        "rollout.name",
        "???",
        "`vllm`, `trtllm`; `sglang` and `hf` become `native`",
    ),
    **{name: (f"rollout.{name}", default, "") for name, default in _SAME.items()},
    "gpu_memory_utilization": (
        "rollout.gpu_memory_utilization",
        0.5,
        "fraction of the free memory at start, less the weights; in verl of the entire GPU, including weights",
    ),
    "multi_turn.enable": (
        "rollout.multi_turn.enable",
        False,
        "without `tool_config_path`, `rollout.agent.environment` must be set",
    ),
    "multi_turn.max_assistant_turns": (
        "rollout.multi_turn.max_assistant_turns",
        None,
        "the environment still rewards the last turn",
    ),
    **{
        f"multi_turn.{name}": (f"rollout.multi_turn.{name}", default, "")
        for name, default in {
            "max_user_turns": None,
            "max_parallel_calls": 1,
            "max_tool_response_length": 256,
            "tool_response_truncate_side": "middle",
            "tokenization_sanity_check_mode": "strict",
        }.items()
    },
    "multi_turn.format": ("rollout.multi_turn.format", "hermes", "`hermes`, `llama3_json`, `qwen3_coder`"),
    "multi_turn.tool_config_path": (
        "rollout.agent.environment_kwargs",
        None,
        "argument of the environment `verl_tools`, which runs verl's tools",
    ),
    "agent.num_workers": ("rollout.agent.num_workers", 8, "worker processes per replica"),
    "quantization": (
        "rollout.quantization",
        None,
        "`fp8`: blocks of 128 x 128, as in verl; values that `vllm` refuses are listed",
    ),
    "prompt_length": ("rollout.prompt_length", "${oc.select:data.max_prompt_length,512}", ""),
    "response_length": ("rollout.response_length", "${oc.select:data.max_response_length,512}", ""),
    "dtype": ("rollout.dtype", "bfloat16", "default `model.dtype`"),
    "expert_parallel_size": ("rollout.expert_parallel_size", 1, "within a replica; with `vllm` 1 or the replica size"),
    "repetition_penalty": ("rollout.repetition_penalty", 1.0, "must be 1: training does not model a penalty"),
    "calculate_log_probs": ("rollout.calculate_log_probs", True, "must be true: they are captured while sampling"),
    "engine_kwargs": ("rollout.engine_kwargs", {}, "for `trtllm` and `vllm`"),
    "engine_kwargs.trtllm": ("rollout.engine_kwargs", {}, "each by its name, except those that other keys set"),
    "engine_kwargs.vllm": (
        "rollout.engine_kwargs",
        {},
        "each by its name; arguments with a key of `rollout` become that key",
    ),
    "cudagraph_capture_sizes": (
        "rollout.engine_kwargs",
        None,
        "with `vllm`, in its `compilation_config`; other engines choose the sizes",
    ),
    "nnodes": (
        "rollout.nnodes",
        0,
        "in addition to `trainer.nnodes`, whose ranks then only train; `train.mode=async` runs both concurrently",
    ),
    "n_gpus_per_node": ("rollout.n_gpus_per_node", "${oc.select:trainer.n_gpus_per_node,8}", "for `rollout.nnodes`"),
    "over_sample_rate": (
        "rollout.over_sample_rate",
        0.0,
        "verl 0.9.1 never reads it; by its comment, late prompts are dropped: `rollout.over_age=drop`",
    ),
    "moe_tensor_parallel_size": ("rollout.moe_tensor_parallel_size", 1, "1 becomes null: replica size / EP"),
}
"""Field -> (mrl's key, default of verl's trainer config, how values differ)."""

_ONE_MODE = "the engine runs in the ranks, without servers; `train.mode=async` samples concurrently with updates"
_REPLICAS = "the number of replicas follows from `rollout.*_model_parallel_size`"
_MICROBATCH = "log-probabilities are computed in the actor's microbatches, `actor.max_tokens_per_microbatch`"
_TOOLS = "tools come from an environment, `rollout.agent.environment`"
_AGENT = "no agent loop: the policy interacts with an environment, `rollout.agent.environment`"
_SAMPLES = "`samples.jsonl` in the run folder contains some samples, `observe.num_samples`"
_SERVER = "no HTTP server: the engine runs in the job's ranks, `run.collective_timeout_s` limits each wait"
_METRICS = "no Prometheus: metrics are in the run folder, TensorBoard and Weights & Biases"
_TRANSPORT = "weight sync uses the job's process groups"
_PROFILER = "no profiler; `timing_s/*` is always measured"
_SPLIT = "prefill and decoding share the ranks"
_DRAFTS = "no multi-token prediction"

NEEDLESS: Mapping[str, str] = {
    "mode": _ONE_MODE,
    "full_determinism": "runs are always deterministic",
    "seed": "`run.seed`; tokens do not depend on the batch",
    "standalone_gpu_memory_utilization": "`rollout.gpu_memory_utilization`, on dedicated GPUs too",
    "data_parallel_size": _REPLICAS,
    "logprobs_mode": "log-probabilities are always those of the sampling distribution",
    "scheduling_policy": "the longest expected response starts first",
    "log_prob_micro_batch_size": _MICROBATCH,
    "log_prob_micro_batch_size_per_gpu": _MICROBATCH,
    "log_prob_use_dynamic_bsz": "microbatches are always filled by tokens, up to `actor.max_tokens_per_microbatch`",
    "log_prob_max_token_len_per_gpu": _MICROBATCH,
    "disable_log_stats": "`perf/rollout/*` is always written",
    "multi_stage_wake_up": "weights and KV cache wake in the order that weight sync needs",
    "engine_kwargs.sglang": "mrl does not have this engine",
    "trace.project_name": _SAMPLES,
    "trace.experiment_name": _SAMPLES,
    "trace.backend": _SAMPLES,
    "trace.token2text": _SAMPLES,
    "trace.max_samples_per_step_per_worker": _SAMPLES,
    "server.timeout": _SERVER,
    "server.max_attempts": _SERVER,
    "server.retry_delay": _SERVER,
    "server.max_connections": _SERVER,
    "server.max_start_wait_time": _SERVER,
    "prometheus.enable": _METRICS,
    "prometheus.port": _METRICS,
    "prometheus.file": _METRICS,
    "prometheus.served_model_name": _METRICS,
    "checkpoint_engine.backend": _TRANSPORT,
    "checkpoint_engine.engine_kwargs": _TRANSPORT,
    "checkpoint_engine.custom_backend_module": _TRANSPORT,
    "profiler.tool": _PROFILER,
    "profiler.enable": _PROFILER,
    "profiler.all_ranks": _PROFILER,
    "profiler.ranks": _PROFILER,
    "profiler.save_path": _PROFILER,
    "profiler.tool_config": _PROFILER,
    "profiler.global_tool_config": _PROFILER,
    "profiler.relocate_results": _PROFILER,
    "profiler.finish_hook_cmd": _PROFILER,
    "profiler.finish_hook_all_ranks": _PROFILER,
    "profiler.finish_hook_ranks": _PROFILER,
    "load_format": "like `dummy`: every engine starts without the model's weights, and weight sync fills them before "
    "the first sample",
    "layered_summon": "weights are always copied in buckets",
    "layer_name_map": "tensor names are defined in `mrl/models`",
    "sglang_engine_mode": "mrl does not have this engine",
    "skip_tokenizer_init": "the engine needs no tokenizer",
    "moe_load_balance_metrics_interval": "`actor/moe/*` is written at every step",
    "enable_sleep_mode": "memory can always be freed; set `rollout.free_cache_engine`",
    "mtp": "see the model's `mtp`",
    "mtp.detach_encoder": _DRAFTS,
    "mtp.mtp_loss_scaling_factor": _DRAFTS,
    "mtp.speculative_algorithm": _DRAFTS,
    "mtp.speculative_num_steps": _DRAFTS,
    "mtp.speculative_eagle_topk": _DRAFTS,
    "mtp.speculative_num_draft_tokens": _DRAFTS,
    "mtp.method": _DRAFTS,
    "mtp.num_speculative_tokens": _DRAFTS,
    "qat": "see the actor's `qat`",
    "disaggregation.prefill_replicas": _SPLIT,
    "disaggregation.decode_replicas": _SPLIT,
    "disaggregation.decode_tensor_model_parallel_size": _SPLIT,
    "disaggregation.transfer_backend": _SPLIT,
    "disaggregation.bootstrap_port": _SPLIT,
    "disaggregation.ib_device": _SPLIT,
    "disaggregation.mooncake_protocol": _SPLIT,
    "router_config_path": "no HTTP router: `mrl/rollout/prompt_assignment.py` distributes the prompts",
}
"""Field -> why no value needs a counterpart, and mrl's alternative."""

ABSENT: Mapping[str, str] = {
    "agent.default_agent_loop": _AGENT,
    "agent.agent_loop_config_path": _AGENT,
    "agent.custom_async_server.path": _AGENT,
    "agent.custom_async_server.name": _AGENT,
    "agent.agent_loop_manager_class": _AGENT,
    "multi_turn.function_tool_path": _TOOLS,
    "multi_turn.use_inference_chat_template": _TOOLS,
    "multi_turn.num_repeat_rollouts": _TOOLS,
    "limit_images": "mrl trains language models on text: rows with images are refused",
    "custom": "verl never reads it; set `rollout.name` to the path of your own engine",
    "checkpoint_manager_class": "the trainer writes checkpoints itself, section `checkpoint`",
    "quantization_config_file": "`rollout.quantization` sets what is quantized",
    "mtp.enable": "no multi-token prediction",
    "mtp.enable_train": "no multi-token prediction",
    "mtp.enable_rollout": "no multi-token prediction",
    "disaggregation.enabled": _SPLIT,
}
"""Field -> why there is no counterpart; harmless if it is off."""

FIELDS = (*MAPS, *NEEDLESS, *ABSENT)


def section_of(name: str) -> str:
    """Returns the first field of a nested section, whose verdict applies to the section; "" if there is none."""
    return next((field for field in (*ABSENT, *NEEDLESS) if field.startswith(f"{name}.")), "")
