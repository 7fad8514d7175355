"""What TensorRT-LLM's engines do with each field of `rollout`, and what they refuse.

Owns the table in `mrl/docs/trtllm.md`, which is made from `TABLE` (`python -m mrl.engines.trtllm.fields`), and the
refusals that need no TensorRT-LLM to know. `preflight/` asks for these before anything starts. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mrl.config import RolloutConfig
from mrl.engines.trtllm import routing
from mrl.engines.trtllm.llm_fields import VERSION
from mrl.errors import UserError

ENGINES = ("trtllm", "trtllm_engine")
"""Names of the engines: the LLM API, and engines that tools/build_trtllm_engine.py built."""


@dataclass(frozen=True)
class Use:
    """What becomes of one field.

    Attributes:
        llm: In `rollout.name=trtllm`.
        built: In `rollout.name=trtllm_engine`.
    """

    llm: str
    built: str


TABLE = {
    "name": Use("this engine", "this engine"),
    "engine_dir": Use(
        "refused: the LLM API has no built engine", "folder of the engines; refused where it is null or has other sizes"
    ),
    "n": Use("each sample is a request of its own", "each sample is a row of its own"),
    "temperature": Use(
        "`SamplingParams.temperature`, always given: without it TensorRT-LLM takes the most likely token",
        "`SamplingConfig.temperature`",
    ),
    "top_k": Use("`SamplingParams.top_k`; -1 becomes 0", "`SamplingConfig.top_k`; -1 becomes 0"),
    "top_p": Use("`SamplingParams.top_p`", "`SamplingConfig.top_p`"),
    "min_p": Use(
        "`SamplingParams.min_p`; refused above 0 where the sampler does not hear it (TorchSampler of some 1.3)",
        "`SamplingConfig.min_p`",
    ),
    "do_sample": Use("false: `top_k=1`", "false: `top_k=1`"),
    "ignore_eos": Use("true: no `stop_token_ids`", "true: no `stop_words_list`"),
    "stop": Use(
        "a response is cut behind it when it has ended: the engine goes on to the end token or the length",
        "the same",
    ),
    "repetition_penalty": Use("must be 1, as everywhere", "must be 1, as everywhere"),
    "prompt_length": Use(
        "longer prompts are refused; `max_input_len` is `max_seq_len`, since a paused request comes again with what it "
        "has sampled",
        "must fit the engine's `max_input_len`",
    ),
    "response_length": Use("`SamplingParams.max_tokens`", "`max_new_tokens`"),
    "max_model_len": Use(
        "`max_seq_len`; null: `prompt_length + response_length`", "must fit the engine's `max_seq_len`"
    ),
    "dtype": Use("`dtype`; null: `model.dtype`", "must be the engine's"),
    "quantization": Use(
        "`fp8`: `quantization_config` of config.json, and `weight_scale_inv` of each matrix in a refit; refused where "
        "a version loads it only at its start. `fp8_per_tensor`: refused, it wants activation scales of a calibration",
        "refused: it wants activation scales of a calibration",
    ),
    "tensor_model_parallel_size": Use(
        "`tensor_parallel_size`; above 1 the ranks are started by mpirun or srun with MPI", "must be the engine's"
    ),
    "pipeline_model_parallel_size": Use(
        "refused above 1: weights that are replaced in place under a pipeline are used nowhere", "must be the engine's"
    ),
    "expert_parallel_size": Use("`moe_expert_parallel_size`", "must be the engine's"),
    "moe_tensor_parallel_size": Use("`moe_tensor_parallel_size`", "must be the engine's"),
    "max_num_seqs": Use("`max_batch_size`", "rows of a batch; must fit the engine's `max_batch_size`"),
    "max_num_batched_tokens": Use(
        "`max_num_tokens`", "prompt tokens of a batch; must fit the engine's `max_num_tokens`"
    ),
    "enable_chunked_prefill": Use(
        "`enable_chunked_prefill`", "a prompt is read in one pass: refused where `max_num_batched_tokens` is shorter"
    ),
    "enable_prefix_caching": Use(
        "`KvCacheConfig.enable_block_reuse`", "must be false: ModelRunner has no prefix cache"
    ),
    "gpu_memory_utilization": Use(
        "`KvCacheConfig.free_gpu_memory_fraction`: of the memory that is free when TensorRT-LLM makes the cache, after "
        "its weights",
        "of the memory that is free once the engine is loaded: as many rows go through it together as their keys, "
        "values and logits fit in",
    ),
    "free_cache_engine": Use(
        "true: KV cache and weights leave the device, the weights into pinned host memory (`enable_sleep` of 1.2), or "
        "discarded before an update, which a refit follows (`sleep_config` of 1.3)",
        "true: the KV cache leaves the device between rollouts; weights and TensorRT's activation memory stay",
    ),
    "enforce_eager": Use(
        "`cuda_graph_config`: none where true, else `CudaGraphConfig(enable_padding=True)`; none too where a 1.2 "
        "engine sleeps, since its own tests leave graphs out there",
        "must be true: ModelRunner captures no CUDA graphs",
    ),
    "calculate_log_probs": Use("must be true, as everywhere", "must be true, as everywhere"),
    "enable_rollout_routing_replay": Use(
        "`enable_return_routed_experts`, and `return_routed_experts` of each request, with the CUTLASS experts and no "
        "request paused; refused where a version lacks them, 1.2 does: `actor.router_replay=recompute` does without",
        "refused: ModelRunner does not tell which experts it chose",
    ),
    "engine_kwargs": Use(
        "`trtllm`: arguments of `LLM` by their own names, merged with what the other keys make",
        "refused: ModelRunner has no such arguments",
    ),
    "val_kwargs": Use("sampling parameters of evaluations", "sampling parameters of evaluations"),
    "checkpoint_engine": Use(
        "size of the buckets that are handed to `ModelLoader.reload`, and of the transport", "size of the transport"
    ),
}
"""Each field of `RolloutConfig`, in its order."""

Refusal = tuple[str, Callable[[RolloutConfig], bool], str]

_CALIBRATED = "which mrl has not and which would grow stale as the actor learns"

LLM_REFUSALS: tuple[Refusal, ...] = (
    (
        "engine_dir",
        lambda r: r.engine_dir is not None,
        "the LLM API has no built engine; use rollout.name=trtllm_engine",
    ),
    (
        "pipeline_model_parallel_size",
        lambda r: r.pipeline_model_parallel_size != 1,
        "weights replaced in place under a pipeline are used nowhere; raise rollout.tensor_model_parallel_size instead",
    ),
    (
        "quantization",
        lambda r: r.quantization == "fp8_per_tensor",
        "TensorRT-LLM's FP8 with one scale for a matrix wants activation scales of a calibration, "
        f"{_CALIBRATED}: without them its second refit fails, and its experts compute with nothing else; "
        "use rollout.quantization=fp8",
    ),
    (
        "enable_rollout_routing_replay",
        lambda r: r.enable_rollout_routing_replay and routing.is_unknown(),
        f"TensorRT-LLM {VERSION} does not tell which experts it chose; an installed build that does is asked. "
        f"{routing.INSTEAD}",
    ),
)
"""(field, whether it is refused, why and what to do) of the LLM API."""

BUILT_REFUSALS: tuple[Refusal, ...] = (
    (
        "quantization",
        lambda r: r.quantization is not None,
        f"a built engine's FP8 multiplies with activation scales of a calibration, {_CALIBRATED}; leave it out, or use "
        "rollout.name=trtllm",
    ),
    (
        "enable_prefix_caching",
        lambda r: r.enable_prefix_caching,
        "TensorRT-LLM's ModelRunner has no prefix cache; set it to false",
    ),
    (
        "enforce_eager",
        lambda r: not r.enforce_eager,
        "TensorRT-LLM's ModelRunner captures no CUDA graphs; set it to true",
    ),
    (
        "enable_chunked_prefill",
        lambda r: r.enable_chunked_prefill and r.prompt_length > r.max_num_batched_tokens,
        "a prompt is read in one pass; raise rollout.max_num_batched_tokens to rollout.prompt_length",
    ),
    (
        "enable_rollout_routing_replay",
        lambda r: r.enable_rollout_routing_replay,
        f"TensorRT-LLM's ModelRunner does not tell which experts it chose. {routing.INSTEAD}",
    ),
)
"""The same of built engines; whether `engine_dir` fits is `mrl/preflight/engine.py`'s business."""

REFUSALS = {"trtllm": LLM_REFUSALS, "trtllm_engine": BUILT_REFUSALS}


def refusals(rollout: RolloutConfig) -> Iterator[str]:
    """One message for each field that the engine of `rollout.name` refuses; none for another engine."""
    for field, refused, why in REFUSALS.get(rollout.name, ()):
        if refused(rollout):
            yield f"rollout.{field}={getattr(rollout, field)} is refused with rollout.name={rollout.name}: {why}."


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


def markdown() -> str:
    """The table of the documentation."""
    rows = ["| `rollout.` | `trtllm` | `trtllm_engine` |", "|---|---|---|"]
    rows += [f"| `{field}` | {use.llm} | {use.built} |" for field, use in TABLE.items()]
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())  # noqa: T201 -- it is what the command is for
