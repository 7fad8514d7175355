"""The checks of TensorRT-LLM: what each asks, what it means that one fails, what to do then; in the page's order."""

from __future__ import annotations

from acceptance.page import Page
from acceptance.result import Check

PLAIN, CUT, GRAPHS, ASLEEP, FP8 = "plain", "cut", "graphs", "asleep", "fp8"
"""Sessions: one start of the engine each, with other settings."""

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
"""Overrides of a session. 1.2 has no CUDA graphs in an engine that sleeps."""


CHECKS: dict[str, Check] = {
    "start": Check(
        PLAIN,
        "Does the engine start in the ranks' own processes?",
        "nothing of this engine can be used here",
        "read the log; the page has the versions, and setup.py's extra [trtllm] those that mrl is written for",
    ),
    "device": Check(
        PLAIN,
        "Is the engine on each rank's own device, and does the rank still compute there?",
        "ranks would share a GPU, or train on another one than they think",
        "give each rank its own CUDA_VISIBLE_DEVICES; with MPI, number the ranks of a host like its GPUs",
    ),
    "refit": Check(
        PLAIN,
        "Do greedy answers stay under a refit of the same weights, change with others, and come back?",
        "samples would not be those of the actor: training goes wrong without an error",
        "do not train with this engine; send the log, and use rollout.name=native meanwhile",
    ),
    "qkv": Check(
        PLAIN,
        "Is the fused q, k, v matrix after a refit that of the model's files, bit by bit?",
        "TensorRT-LLM cuts or fuses the tensors of a refit in another way than its start from files does",
        "do not train with this engine; what failed says whether elements differ or only their order",
    ),
    "sleep": Check(
        PLAIN,
        "Does sleeping free the engine's memory, and are the answers the same after waking?",
        "a trainer and an engine on one GPU run out of memory, or the engine forgets its weights",
        "rollout.free_cache_engine=false where both fit at the same time, else rollout.name=native",
    ),
    "pause": Check(
        PLAIN,
        "Does the event loop outlive pauses in a row, and a pause or a rest longer than its hang detector waits?",
        "a refit of a large model, a long update of the actor, or a refit at a bad moment would end or hang the job",
        "send the log; meanwhile rollout.name=native",
    ),
    "ends": Check(
        PLAIN,
        "Does a response end at its end token, which stays part of it?",
        "responses would be cut or run on: rewards and lengths are wrong",
        "do not train with this engine; the log has both responses",
    ),
    "seeds": Check(
        PLAIN,
        "Are the samples of a prompt different, and the same alone and among others?",
        "the samples of a group would be one and the same, and teach nothing",
        "do not train with this engine; that samples depend on the batch is only noted",
    ),
    "logprobs": Check(
        PLAIN,
        "Are its log-probabilities those that the actor computes for the same tokens?",
        "either a refit loses something, or the log-probabilities are of another distribution",
        "train on the actor's own: algorithm.rollout_correction.bypass_mode=false; if 'refit' or 'qkv' fails too, "
        "do not train",
    ),
    "contract": Check(
        CUT,
        "The same with a temperature and top_p: what was probed, and is the result exact?",
        "policy gradients under this sampling would be wrong",
        "temperature 1 without truncation, or algorithm.rollout_correction.bypass_mode=false",
    ),
    "graphs": Check(
        GRAPHS,
        "Are the answers with CUDA graphs those without, also after refits?",
        "captured graphs compute with old weights or addresses",
        "rollout.enforce_eager=true",
    ),
    "graphs_asleep": Check(
        ASLEEP,
        "The same with an engine that sleeps between them, and discards its weights where it can.",
        "captured graphs compute with memory that another one has, or with weights that were discarded",
        "rollout.enforce_eager=true, or rollout.free_cache_engine=false where both fit at the same time",
    ),
    "fp8": Check(
        FP8,
        "In FP8 (rollout.quantization=fp8): do answers stay under refits, and do samples have the log-probabilities of "
        "the weights that FP8 stands for?",
        "scales are lost or in the wrong place: samples would be those of another model",
        "leave rollout.quantization out; the page has how far log-probabilities are apart, and from what",
    ),
    "end": Check(
        PLAIN,
        "Does the process end in order?",
        "a job would hang at its end; its checkpoints are whole by then",
        "read the log; a launcher's own time limit ends it",
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
