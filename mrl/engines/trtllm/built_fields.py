"""Treatment of each field of `rollout` by built engines (`rollout.name=trtllm_engine`), and rejected values.

`engine_dir.py` compares `rollout.engine_dir` with the run's model and sizes and reports each mismatch;
the fields here only mention it. Imports no torch.
"""

from __future__ import annotations

from mrl.engines._field_support import (
    NO_PARTIAL_ROLLOUTS,
    Fields,
    FieldSupport,
    Refusal,
    no_speculation,
    passed,
    refused,
)
from mrl.engines.trtllm import routing
from mrl.engines.trtllm.fields import CALIBRATED, NOT_ON_POLICY

OTHER = "does not fit the run"
"""Message about a folder of engines of other sizes."""

SAME = Refusal("where it is not the engine's", OTHER)
FITS = Refusal("above the engine's", OTHER)

FIELDS: Fields = {
    **NO_PARTIAL_ROLLOUTS,
    **no_speculation("they are built without drafts", "Use rollout.name=native, or leave it out."),
    "engine_dir": FieldSupport(
        "folder of the engines, which must match the run",
        refuses=(Refusal("where it is null", "needs rollout.engine_dir"),),
    ),
    "n": FieldSupport("each sample is a separate row"),
    "temperature": passed("SamplingConfig.temperature"),
    "top_k": passed("SamplingConfig.top_k", does="-1 becomes 0"),
    "top_p": passed("SamplingConfig.top_p"),
    "min_p": passed("SamplingConfig.min_p"),
    "do_sample": FieldSupport("false: `SamplingConfig.top_k=1`"),
    "ignore_eos": FieldSupport("true: no `SamplingConfig.stop_words_list`"),
    "stop": FieldSupport("a finished response is cut after it"),
    "prompt_length": FieldSupport("`max_input_len` of the build", refuses=(FITS,)),
    "response_length": passed("SamplingConfig.max_new_tokens"),
    "max_model_len": FieldSupport(
        "`max_seq_len` of the build; null: `prompt_length + response_length`", refuses=(FITS,)
    ),
    "dtype": FieldSupport("null: `model.dtype`", refuses=(SAME,)),
    "quantization": refused(
        f"a built engine's FP8 {CALIBRATED}",
        lambda r: r.quantization is not None,
        "Leave it out, or use rollout.name=trtllm.",
    ),
    "tensor_model_parallel_size": FieldSupport("ranks per stage, started by mpirun or srun with MPI", refuses=(SAME,)),
    "pipeline_model_parallel_size": FieldSupport("stages of a replica", refuses=(SAME,)),
    "expert_parallel_size": FieldSupport("ranks over which a layer's experts are distributed", refuses=(SAME,)),
    "moe_tensor_parallel_size": FieldSupport("must be the replica's ranks divided by `expert_parallel_size`"),
    "max_num_seqs": FieldSupport("rows of a batch", refuses=(FITS,)),
    "max_num_batched_tokens": FieldSupport("prompt tokens of a batch", refuses=(FITS,)),
    "enable_chunked_prefill": FieldSupport(
        "false, or not needed",
        refuses=(
            Refusal(
                "where `max_num_batched_tokens` is shorter than `prompt_length`",
                "a prompt is read in one pass",
                lambda r: r.enable_chunked_prefill and r.prompt_length > r.max_num_batched_tokens,
                "Raise rollout.max_num_batched_tokens to rollout.prompt_length.",
            ),
        ),
    ),
    "enable_prefix_caching": FieldSupport(
        refuses=(
            Refusal(
                "where true",
                "TensorRT-LLM's ModelRunner has no prefix cache",
                lambda r: r.enable_prefix_caching,
                "Set it to false.",
            ),
        )
    ),
    "gpu_memory_utilization": FieldSupport(
        "fraction of the memory that is free once the engine is loaded; it limits the rows of a batch by their keys, "
        "values and logits"
    ),
    "free_cache_engine": FieldSupport(
        "true: the KV cache is freed between rollouts; weights and TensorRT's activation memory stay on the device"
    ),
    "enforce_eager": FieldSupport(
        refuses=(
            Refusal(
                "where false",
                "TensorRT-LLM's ModelRunner captures no CUDA graphs",
                lambda r: not r.enforce_eager,
                "Set it to true.",
            ),
        )
    ),
    "true_on_policy": NOT_ON_POLICY,
    "enable_rollout_routing_replay": refused(
        "TensorRT-LLM's ModelRunner does not return the chosen experts",
        lambda r: r.enable_rollout_routing_replay,
        f"{routing.INSTEAD}.",
    ),
    "multi_turn.enable": refused(
        "the prompt of a later turn is longer than `rollout.prompt_length`, for which they are built",
        lambda r: r.multi_turn.enable,
        "Use rollout.name=trtllm or native.",
    ),
    "engine_kwargs": refused("nothing would read it"),
    "checkpoint_engine.canary": FieldSupport("null: true; syncs the weights twice at start and compares the responses"),
}
