"""Table of the TensorRT-LLM checks: question, meaning of a failure, and remedy, in the order of the report."""

from __future__ import annotations

from acceptance.page import Page
from acceptance.result import Check

PLAIN, CUT, GRAPHS, ASLEEP, FP8 = "plain", "cut", "graphs", "asleep", "fp8"
"""Sessions: one start of the engine each, with different settings."""

SETTINGS: dict[str, tuple[str, ...]] = {
    PLAIN: ("rollout.enforce_eager=true", "rollout.free_cache_engine=true"),
    CUT: (
        "rollout.enforce_eager=true",
        "rollout.free_cache_engine=true",
        "rollout.temperature=0.7",
        "rollout.top_p=0.9",
    ),
    GRAPHS: ("rollout.enforce_eager=false", "rollout.free_cache_engine=false"),
    ASLEEP: ("rollout.enforce_eager=false", "rollout.free_cache_engine=true"),
    FP8: (
        "rollout.enforce_eager=true",
        "rollout.free_cache_engine=true",
        "rollout.quantization=fp8",
        "rollout.dtype=bfloat16",
    ),
}
"""Overrides of a session. TensorRT-LLM 1.2 has no CUDA graphs in an engine that sleeps."""


CHECKS: dict[str, Check] = {
    "start": Check(
        PLAIN,
        "Does the engine start in the ranks' own processes?",
        "this engine cannot be used on this machine",
        "read the log; compare the versions in the report with setup.py's extra [trtllm]",
    ),
    "device": Check(
        PLAIN,
        "Is the engine on each rank's own device, and is that still the rank's current device?",
        "ranks would share a GPU, or train on the wrong one",
        "give each rank its own CUDA_VISIBLE_DEVICES; with MPI, number the ranks of a host like its GPUs",
    ),
    "refit": Check(
        PLAIN,
        "Do greedy responses stay the same after syncing the same weights, change with others, and return?",
        "samples would not come from the actor's weights: training goes wrong without an error",
        "do not train with this engine; send the log, and use rollout.name=native meanwhile",
    ),
    "qkv": Check(
        PLAIN,
        "Does the fused QKV matrix after a weight sync equal that of the model's files, bit by bit?",
        "TensorRT-LLM shards or fuses synced tensors differently from those loaded from files",
        "do not train with this engine; the error says whether elements differ or only their order",
    ),
    "sleep": Check(
        PLAIN,
        "Does sleeping free the engine's memory, and are the responses the same after waking?",
        "a trainer and an engine on one GPU run out of memory, or the engine loses its weights",
        "rollout.free_cache_engine=false if both fit at the same time, otherwise rollout.name=native",
    ),
    "pause": Check(
        PLAIN,
        "Does the event loop survive pauses in a row, and a pause or idle time longer than its hang detector's limit?",
        "a weight sync of a large model, a long update, or a sync at a bad moment would end or hang the job",
        "send the log; use rollout.name=native meanwhile",
    ),
    "ends": Check(
        PLAIN,
        "Does a response end at its end token, and include it?",
        "responses would be cut or too long: rewards and lengths are wrong",
        "do not train with this engine; the log has both responses",
    ),
    "seeds": Check(
        PLAIN,
        "Are the samples of a prompt different, and the same alone and among others?",
        "all samples of a group would be equal and give no gradient",
        "do not train with this engine; samples that depend on the batch are only reported, not a failure",
    ),
    "logprobs": Check(
        PLAIN,
        "Do its log-probabilities equal the actor's for the same tokens?",
        "either a weight sync is incomplete, or the log-probabilities are those of another distribution",
        "train on the actor's own: algorithm.rollout_correction.bypass_mode=false; if 'refit' or 'qkv' fails too, "
        "do not train",
    ),
    "contract": Check(
        CUT,
        "The same with a temperature and top_p: what did the probe find, and are log-probabilities exact?",
        "policy gradients under this sampling would be wrong",
        "temperature 1 without truncation, or algorithm.rollout_correction.bypass_mode=false",
    ),
    "graphs": Check(
        GRAPHS,
        "Are responses the same with and without CUDA graphs, also after weight syncs?",
        "captured graphs compute with old weights or addresses",
        "rollout.enforce_eager=true",
    ),
    "graphs_asleep": Check(
        ASLEEP,
        "The same with an engine that sleeps in between, and discards its weights if it can.",
        "captured graphs read memory that is in other use, or weights that were discarded",
        "rollout.enforce_eager=true, or rollout.free_cache_engine=false if both fit at the same time",
    ),
    "fp8": Check(
        FP8,
        "In FP8 (rollout.quantization=fp8): do responses stay the same after weight syncs, and do samples have the "
        "log-probabilities of the weights rounded to FP8?",
        "scales are lost or in the wrong place: samples would come from another model",
        "do not set rollout.quantization; see the differences of log-probabilities in the report",
    ),
    "end": Check(
        PLAIN,
        "Does the process exit cleanly?",
        "a job would hang at its end; its checkpoints are complete by then",
        "read the log; the launcher's time limit ends the job",
    ),
}

PAGE = Page(
    "TensorRT-LLM with mrl",
    "acceptance",
    CHECKS,
    {
        "native": "the control, mrl's own (`rollout.name=native`)",
        "trtllm": "LLM API (`rollout.name=trtllm`)",
        "trtllm_engine": "built engine (`rollout.name=trtllm_engine`)",
    },
)
