"""What TensorRT-LLM's LLM API does with each field of `rollout`, and what it refuses; which launchers can hold it.

Owns the declaration of `rollout.name=trtllm`; that of built engines is in `built_fields.py`. `trainer/validation/` asks
before anything starts. It imports no torch.
"""

from __future__ import annotations

from mrl.config.config import RolloutConfig
from mrl.engines._config_support import (
    ANOTHERS,
    ENGINE_DIR,
    WHOLE_RESPONSES,
    Fields,
    Refusal,
    Use,
    no_drafts,
    not_on_policy,
    passed,
)
from mrl.engines.trtllm import routing
from mrl.engines.trtllm.llm_fields import VERSION
from mrl.errors import UserError

ENGINES = ("trtllm", "trtllm_engine")
"""Names of the engines: the LLM API, and engines that tools/build_trtllm_engine.py built."""

CALIBRATED = (
    "wants activation scales of a calibration, which mrl has not and which would grow stale as the actor learns"
)

NOT_ON_POLICY = not_on_policy(
    "its kernels are not the actor's, and add a row's numbers in an order that follows from the batch"
)
"""Of built engines too."""

FIELDS: Fields = {
    **WHOLE_RESPONSES,
    **no_drafts(
        "nothing shows that TensorRT-LLM's tokens stay the same with drafts",
        "Its own drafts are asked for with rollout.engine_kwargs.trtllm.speculative_config={decoding_type: NGram}.",
    ),
    "engine_dir": ENGINE_DIR,
    "n": Use("each sample is a request of its own"),
    "temperature": passed(
        "SamplingParams.temperature", does="always given: without it TensorRT-LLM takes the most likely token"
    ),
    "top_k": passed("SamplingParams.top_k", does="-1 becomes 0"),
    "top_p": passed("SamplingParams.top_p"),
    "min_p": passed(
        "SamplingParams.min_p",
        does="a version whose sampler does not hear it (TorchSampler of some 1.3) refuses it at the start",
    ),
    "do_sample": Use("false: `SamplingParams.top_k=1`"),
    "ignore_eos": Use("true: no `SamplingParams.stop_token_ids`"),
    "stop": Use("a response is cut behind it when it has ended: the engine goes on to the end token or the length"),
    "prompt_length": passed(
        "max_input_len", does="which is `max_seq_len`, since a paused request comes again with what it has sampled"
    ),
    "response_length": passed("SamplingParams.max_tokens"),
    "max_model_len": passed("max_seq_len", does="null: `prompt_length + response_length`"),
    "dtype": passed("dtype", does="null: `model.dtype`"),
    "quantization": Use(
        "`fp8`: `quantization_config` of config.json, and `weight_scale_inv` of each matrix in a refit; a version that "
        "loads it only at its start refuses it there",
        refuses=(
            Refusal(
                "as `fp8_per_tensor`",
                f"TensorRT-LLM's FP8 with one scale for a matrix {CALIBRATED}",
                lambda r: r.quantization == "fp8_per_tensor",
                "Without them its second refit fails, and its experts compute with nothing else. Use "
                "rollout.quantization=fp8.",
            ),
        ),
    ),
    "tensor_model_parallel_size": passed(
        "tensor_parallel_size", does="above 1 the ranks are started by mpirun or srun with MPI"
    ),
    "pipeline_model_parallel_size": Use(
        refuses=(
            Refusal(
                "above 1",
                "weights replaced in place under a pipeline are used nowhere",
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
        does="of the memory that is free when TensorRT-LLM makes the cache, after its weights",
    ),
    "free_cache_engine": passed(
        "enable_sleep",
        does="true: KV cache and weights leave the device, the weights into pinned host memory; 1.3 (`sleep_config`) "
        "discards them before an update, which a refit follows",
    ),
    "enforce_eager": passed(
        "cuda_graph_config",
        does="none where true, else `CudaGraphConfig(enable_padding=True)`; none too where a 1.2 engine sleeps, since "
        "its own tests leave graphs out there",
    ),
    "true_on_policy": NOT_ON_POLICY,
    "enable_rollout_routing_replay": Use(
        "`enable_return_routed_experts`, and `return_routed_experts` of each request, with the CUTLASS experts and no "
        "request paused",
        refuses=(
            Refusal(
                "by a version that lacks them",
                f"TensorRT-LLM {VERSION} does not tell which experts it chose; an installed build that does is asked",
                lambda r: r.enable_rollout_routing_replay and routing.is_unknown(),
                f"{routing.INSTEAD}.",
            ),
        ),
    ),
    "engine_kwargs": Use(
        "arguments of `LLM` by their own names, under `trtllm`: [which](trtllm.md#arguments-of-its-own)",
        refuses=(ANOTHERS,),
    ),
    "checkpoint_engine.update_weights_bucket_megabytes": Use(
        "size of the buckets that are handed to `ModelLoader.reload`, and of the transport"
    ),
    "checkpoint_engine.canary": Use("null: yes; refits twice at start and compares answers"),
}


def needs_mpi(rollout: RolloutConfig) -> bool:
    """Whether a replica has several ranks, which TensorRT-LLM lets talk over MPI."""
    return rollout.name in ENGINES and rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size > 1


def check_launcher(rollout: RolloutConfig, launcher: str) -> None:
    """Returns where a job of this launcher can hold the replicas; with srun MPI itself must be asked.

    Raises:
        UserError: It cannot.
    """
    if needs_mpi(rollout) and launcher in ("none", "torchrun"):
        size = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size
        raise UserError(not_over_mpi(rollout.name, launcher, size))


def not_over_mpi(name: str, launcher: str, size: int) -> str:
    """Why a replica of several ranks does not start in a job of this launcher."""
    return (
        f"rollout.name={name} with {size} ranks in a replica needs ranks that MPI started, since "
        f"TensorRT-LLM's own ranks talk over it; these were started by {launcher if launcher != 'none' else 'hand'}. "
        "Use launch/mpirun.sh, or srun with --mpi (launch/slurm.sbatch with MODE=srun SRUN_ARGS=--mpi=pmix, mrl launch "
        "with --mode srun)."
    )
