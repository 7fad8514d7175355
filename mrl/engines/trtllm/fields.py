"""Treatment of each field of `rollout` by `rollout.name=trtllm` (the LLM API), rejected values, and launcher rules.

Built engines have `built_fields.py`. `trainer/validation/` reads both before anything starts. Imports no torch.
"""

from __future__ import annotations

from mrl.config.config import RolloutConfig
from mrl.engines._field_support import (
    ENGINE_DIR,
    NO_PARTIAL_ROLLOUTS,
    OTHER_ENGINE,
    Fields,
    FieldSupport,
    Refusal,
    no_speculation,
    no_true_on_policy,
    passed,
)
from mrl.engines.trtllm import routing
from mrl.engines.trtllm.llm_fields import VERSION
from mrl.errors import UserError

ENGINES = ("trtllm", "trtllm_engine")
"""Names of the engines: the LLM API, and engines built by tools/build_trtllm_engine.py."""

CALIBRATED = (
    "needs activation scales from a calibration, which mrl does not run and which would become stale during training"
)

NOT_ON_POLICY = no_true_on_policy("its kernels differ from the actor's, and their summation order depends on the batch")
"""Rule for `true_on_policy`, shared with built engines."""

FIELDS: Fields = {
    **NO_PARTIAL_ROLLOUTS,
    **no_speculation(
        "it is not verified that drafts leave TensorRT-LLM's tokens unchanged",
        "Enable its own drafts with rollout.engine_kwargs.trtllm.speculative_config={decoding_type: NGram}.",
    ),
    "engine_dir": ENGINE_DIR,
    "n": FieldSupport("each sample is a request of its own"),
    "temperature": passed("SamplingParams.temperature", does="always passed: without it TensorRT-LLM samples greedily"),
    "top_k": passed("SamplingParams.top_k", does="-1 becomes 0"),
    "top_p": passed("SamplingParams.top_p"),
    "min_p": passed(
        "SamplingParams.min_p",
        does="rejected at the start by versions whose sampler ignores it (TorchSampler of some 1.3)",
    ),
    "do_sample": FieldSupport("false: `SamplingParams.top_k=1`"),
    "ignore_eos": FieldSupport("true: no `SamplingParams.stop_token_ids`"),
    "stop": FieldSupport(
        "a finished response is cut after it; the engine itself samples on to the end token or the length"
    ),
    "prompt_length": passed(
        "max_input_len", does="set to `max_seq_len`, since a paused request is resubmitted with its sampled tokens"
    ),
    "response_length": passed("SamplingParams.max_tokens"),
    "max_model_len": passed("max_seq_len", does="null: `prompt_length + response_length`"),
    "dtype": passed("dtype", does="null: `model.dtype`"),
    "quantization": FieldSupport(
        "`fp8`: `quantization_config` of config.json, and `weight_scale_inv` of each matrix in a weight sync; rejected "
        "at the start by versions that load FP8 weights only then",
        refuses=(
            Refusal(
                "as `fp8_per_tensor`",
                f"TensorRT-LLM's FP8 with one scale per matrix {CALIBRATED}",
                lambda r: r.quantization == "fp8_per_tensor",
                "Without them its second weight sync fails, and its MoE layers cannot run. Use "
                "rollout.quantization=fp8.",
            ),
        ),
    ),
    "tensor_model_parallel_size": passed(
        "tensor_parallel_size", does="above 1, ranks must be started by mpirun or srun with MPI"
    ),
    "pipeline_model_parallel_size": FieldSupport(
        refuses=(
            Refusal(
                "above 1",
                "replacing weights in place is not implemented with pipeline parallelism",
                lambda r: r.pipeline_model_parallel_size != 1,
                "Raise rollout.tensor_model_parallel_size instead.",
            ),
        )
    ),
    "expert_parallel_size": passed("moe_expert_parallel_size"),
    "moe_tensor_parallel_size": passed("moe_tensor_parallel_size"),
    "max_num_seqs": passed("max_batch_size"),
    "max_num_batched_tokens": passed("max_num_tokens"),
    "enable_chunked_prefill": passed("enable_chunked_prefill"),
    "enable_prefix_caching": passed("kv_cache_config.enable_block_reuse"),
    "gpu_memory_utilization": passed(
        "kv_cache_config.free_gpu_memory_fraction",
        does="fraction of the memory that is free when TensorRT-LLM allocates the cache, after its weights",
    ),
    "free_cache_engine": passed(
        "enable_sleep",
        does="true: the KV cache is freed and the weights move to pinned host memory while training; 1.3 "
        "(`sleep_config`) discards the weights before an update, since a weight sync follows",
    ),
    "enforce_eager": passed(
        "cuda_graph_config",
        does="null where true, else `CudaGraphConfig(enable_padding=True)`; also null where a 1.2 engine sleeps, which "
        "its own tests do not cover with graphs",
    ),
    "true_on_policy": NOT_ON_POLICY,
    "enable_rollout_routing_replay": FieldSupport(
        "`enable_return_routed_experts`, and `return_routed_experts` of each request, with the CUTLASS MoE backend and "
        "no paused requests",
        refuses=(
            Refusal(
                "by a version that lacks them",
                f"TensorRT-LLM {VERSION} does not return the chosen experts; an installed version is checked itself",
                lambda r: r.enable_rollout_routing_replay and routing.is_unknown(),
                f"{routing.INSTEAD}.",
            ),
        ),
    ),
    "engine_kwargs": FieldSupport(
        "arguments of `LLM` by their own names, under `trtllm`: [list](trtllm.md#arguments-of-its-own)",
        refuses=(OTHER_ENGINE,),
    ),
    "checkpoint_engine.update_weights_bucket_megabytes": FieldSupport(
        "bucket size of the transport and of `ModelLoader.reload`"
    ),
    "checkpoint_engine.canary": FieldSupport("null: true; syncs the weights twice at start and compares the responses"),
}


def needs_mpi(rollout: RolloutConfig) -> bool:
    """Returns whether a replica has several ranks, which must communicate over MPI."""
    return rollout.name in ENGINES and rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size > 1


def check_launcher(rollout: RolloutConfig, launcher: str) -> None:
    """Checks that ranks started by this launcher can form the replicas; with srun, MPI must be queried in addition.

    Raises:
        UserError: The replicas need MPI and the launcher does not start it.
    """
    if needs_mpi(rollout) and launcher in ("none", "torchrun"):
        size = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size
        raise UserError(not_over_mpi(rollout.name, launcher, size))


def not_over_mpi(name: str, launcher: str, size: int) -> str:
    """Returns the message that a replica of several ranks cannot start under this launcher."""
    return (
        f"rollout.name={name} with {size} ranks per replica needs ranks started by MPI, since TensorRT-LLM "
        f"communicates over MPI; these were started by {launcher if launcher != 'none' else 'hand'}. "
        "Use launch/mpirun.sh, or srun with --mpi (launch/slurm.sbatch with MODE=srun SRUN_ARGS=--mpi=pmix, mrl launch "
        "with --mode srun)."
    )
