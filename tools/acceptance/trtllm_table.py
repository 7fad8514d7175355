"""Checks of TensorRT-LLM in the order of the page: question, consequence of a failure, and remedy."""

from __future__ import annotations

from acceptance.page import Page
from acceptance.result import Check

PLAIN, CUT, GRAPHS, ASLEEP, FP8 = "plain", "cut", "graphs", "asleep", "fp8"
"""Sessions; each starts the engine once, with its own settings."""

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
"""Overrides of each session. 1.2 does not support CUDA graphs in an engine that sleeps."""


CHECKS: dict[str, Check] = {
    "start": Check(
        PLAIN,
        "Does the engine start in the ranks' own processes?",
        "this engine cannot be used here",
        "read the log; compare the versions on the page with those of setup.py's extra [trtllm]",
    ),
    "device": Check(
        PLAIN,
        "Is the engine on each rank's own device, and is that still the current device?",
        "ranks would share a GPU, or train on the wrong one",
        "give each rank its own CUDA_VISIBLE_DEVICES; with MPI, order the ranks of a host like its GPUs",
    ),
    "refit": Check(
        PLAIN,
        "Do greedy responses stay the same after syncing the same weights, change with others, and return?",
        "samples would not come from the actor's weights: training fails silently",
        "do not train with this engine; report the log, and use rollout.name=native meanwhile",
    ),
    "qkv": Check(
        PLAIN,
        "Is the fused q, k, v matrix after a weight sync bitwise equal to the model's files?",
        "TensorRT-LLM shards or fuses synced tensors differently from tensors loaded from files",
        "do not train with this engine; the message says whether elements or only their order differ",
    ),
    "sleep": Check(
        PLAIN,
        "Does sleeping free the engine's memory, and are the responses the same after waking?",
        "trainer and engine on one GPU run out of memory, or the engine loses its weights",
        "rollout.free_cache_engine=false if both fit at the same time, else rollout.name=native",
    ),
    "pause": Check(
        PLAIN,
        "Does the event loop survive consecutive pauses, and a pause or idle time beyond its hang detector's timeout?",
        "a weight sync of a large model, a long update of the actor, or an unlucky weight sync would kill or hang the "
        "job",
        "report the log; meanwhile use rollout.name=native",
    ),
    "ends": Check(
        PLAIN,
        "Does a response end with its end token?",
        "responses would be cut or continue: rewards and lengths are wrong",
        "do not train with this engine; the log has both responses",
    ),
    "seeds": Check(
        PLAIN,
        "Do samples of a prompt differ, and is a sample the same alone and in a batch?",
        "all samples of a group would be equal, with no learning signal",
        "do not train with this engine; a dependence on the batch is only noted",
    ),
    "logprobs": Check(
        PLAIN,
        "Do its log-probabilities equal those of the actor for the same tokens?",
        "either a weight sync loses something, or the log-probabilities are of another distribution",
        "train on the actor's own log-probabilities: algorithm.rollout_correction.bypass_mode=false; if 'refit' or "
        "'qkv' fails too, do not train",
    ),
    "contract": Check(
        CUT,
        "Same with temperature and top_p: what did the probe find, and is the result exact?",
        "policy gradients under these sampling settings would be wrong",
        "use temperature 1 without truncation, or algorithm.rollout_correction.bypass_mode=false",
    ),
    "graphs": Check(
        GRAPHS,
        "Are responses with CUDA graphs equal to those without, also after weight syncs?",
        "captured graphs use old weights or addresses",
        "rollout.enforce_eager=true",
    ),
    "graphs_asleep": Check(
        ASLEEP,
        "Same with an engine that sleeps in between, and discards its weights if it can.",
        "captured graphs use memory that was given away, or discarded weights",
        "rollout.enforce_eager=true, or rollout.free_cache_engine=false if both fit at the same time",
    ),
    "fp8": Check(
        FP8,
        "In FP8 (rollout.quantization=fp8): do weight syncs work, and do samples have the log-probabilities of the "
        "dequantised weights?",
        "scales are lost or misplaced: samples would come from another model",
        "leave rollout.quantization out; the page has the differences of the log-probabilities",
    ),
    "end": Check(
        PLAIN,
        "Does the process exit cleanly?",
        "a job would hang at its end, after its checkpoints are complete",
        "read the log; use the launcher's time limit",
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
