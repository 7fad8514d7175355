"""Checks of a GPU in the order of the page: question, session, consequence of a failure, and remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from acceptance.page import Page
from acceptance.result import Check

JOB, COMMANDS = "job", "commands"
"""Sessions: a started job, or a process that runs mrl's own commands."""

SEVERAL = 2
"""Number of ranks of multi-GPU checks."""

TOGETHER = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
AWAY = tuple(f"actor.{part}_offload=true" for part in ("param", "grad", "optimizer"))
STEPS = ("train.num_steps=2", "checkpoint.interval=1")
FP8 = (
    "train.num_steps=2",
    "model.dtype=bfloat16",
    "rollout.quantization=fp8",
    "rollout.response_length=16",
    "algorithm.entropy_coef=0.01",  # a gradient, even if all rewards are 0
    "algorithm.rollout_correction.preset=decoupled_token_is",
    "megatron.transformer={fp8: e4m3, fp8_recipe: blockwise}",
)
NO_TRAIN = "do not train on this machine before the cause is found; report the page and the log"


@dataclass(frozen=True)
class GpuCheck(Check):
    """One row of the page; see `Check` for more fields.

    Attributes:
        num_ranks: Ranks of the session, each on its own GPU.
        model: "dense" and "experts" are small and have a folder with weights; "large" fills a GPU.
        settings: Config overrides of the session.
        alone: True if it measures time or memory of the device, so that nothing else may run.
        after: Name of the check whose findings it reads; "" for none.
    """

    num_ranks: int = 1
    model: Literal["dense", "experts", "large"] = "dense"
    settings: tuple[str, ...] = ()
    alone: bool = False
    after: str = ""


CHECKS: dict[str, GpuCheck] = {
    "device": GpuCheck(
        COMMANDS,
        "Is the device present and as fast as specified, and can TransformerEngine, if installed, be imported?",
        "without TransformerEngine the actor uses Megatron's local layers: half as fast, MoE far slower; a slow device "
        "is shared, hot or throttled",
        "install `.[gpu]` as in README, for the installed torch; check nvidia-smi",
        alone=True,
    ),
    "attention": GpuCheck(
        COMMANDS,
        "Is torch's attention slower for new shapes, or does it keep all scores in memory?",
        "every step has new shapes: updates without TransformerEngine, prefill and eager decoding would be many times "
        "slower, or run out of memory with long sequences",
        "check `torch.backends.cuda` for the enabled kernels; compare the measurements of each kind on the page",
        alone=True,
    ),
    "parity": GpuCheck(
        JOB,
        "Do the actor's log-probabilities, loss and gradient norm match transformers in fp32?",
        "the actor's forward or backward pass is wrong for its weights",
        f"try actor.transformer_impl=local; {NO_TRAIN}",
    ),
    "parity_local": GpuCheck(
        JOB,
        "Same with Megatron's local layers: is the cause TransformerEngine or the code around it?",
        "the parts that both share are wrong: packing, layout or weights",
        NO_TRAIN,
        settings=("actor.transformer_impl=local",),
    ),
    "shared": GpuCheck(
        JOB,
        "Same with shared prompts computed once; how much time does it save?",
        "TransformerEngine's attention with more keys than queries, or the copies of keys are wrong",
        "actor.use_prefix_grouper=false",
        alone=True,
    ),
    "experts": GpuCheck(
        JOB,
        "Same with a MoE model and grouped GEMMs",
        "experts, their order or their routing do not match the weights",
        f"try actor.transformer_impl=local; {NO_TRAIN}",
        model="experts",
    ),
    "refit": GpuCheck(
        JOB,
        "Do greedy responses stay the same after syncing the same weights, change with others, and return?",
        "samples would not come from the actor's weights",
        NO_TRAIN,
        settings=("rollout.enforce_eager=true",),
    ),
    "logprobs": GpuCheck(
        JOB,
        "Do the engine's log-probabilities with CUDA graphs equal those of the actor?",
        "policy gradients would be of another distribution",
        "rollout.enforce_eager=true; if that does not help, algorithm.rollout_correction.bypass_mode=false",
        settings=("rollout.enforce_eager=false",),
    ),
    "experts_logprobs": GpuCheck(
        JOB,
        "Same with a MoE model: grouped GEMMs inside CUDA graphs",
        "policy gradients would be of another distribution",
        "rollout.enforce_eager=true; torch 2.10 or newer has the grouped GEMM",
        model="experts",
        settings=("rollout.enforce_eager=false",),
    ),
    "contract": GpuCheck(
        JOB,
        "Same with temperature and top_p",
        "policy gradients under these sampling settings would be wrong",
        "use temperature 1 without truncation, or algorithm.rollout_correction.bypass_mode=false",
        settings=("rollout.temperature=0.7", "rollout.top_p=0.9"),
    ),
    "graphs": GpuCheck(
        JOB,
        "Are responses with CUDA graphs equal to those without, also after weight syncs?",
        "captured graphs use old weights or addresses",
        "rollout.enforce_eager=true",
        settings=("rollout.enforce_eager=false", "rollout.free_cache_engine=false"),
        after="refit",
    ),
    "graphs_asleep": GpuCheck(
        JOB,
        "Same with the engine's memory freed between rollouts, as in training",
        "a graph reads memory that was reallocated at another address",
        "rollout.enforce_eager=true, or rollout.free_cache_engine=false if actor and engine fit",
        settings=("rollout.enforce_eager=false", "rollout.free_cache_engine=true"),
        after="refit",
    ),
    "cycles": GpuCheck(
        JOB,
        "Are memory and responses constant over five cycles of waking, sampling, sleeping and training, and are CUDA "
        "graphs captured only once?",
        "each step would need more memory until none is left, or more time",
        "rollout.enforce_eager=true shows whether the graphs are the cause; a lower rollout.gpu_memory_utilization "
        "leaves more room",
        settings=("rollout.free_cache_engine=true",),
        alone=True,
    ),
    "offload": GpuCheck(
        JOB,
        "Does offloading free the actor's memory, use no more host memory than that, and restore the same weights?",
        "actor and engine do not fit on one GPU, or the host runs out of memory",
        "actor.*_offload=false if both fit; `mrl plan` computes the memory needed",
        model="large",
        settings=AWAY,
        alone=True,
    ),
    "commit": GpuCheck(
        COMMANDS,
        "Are the metrics of a step after a resume equal to those without the interruption?",
        "a checkpoint lacks a part of the run's state",
        "a resumed run diverges from the original; do not rely on requeueing before the cause is found",
        settings=STEPS,
    ),
    "commit_async": GpuCheck(
        COMMANDS,
        "Same with asynchronous checkpoints; how long does training wait for them?",
        "a checkpoint has weights of another step",
        "checkpoint.async_save=false",
        settings=(*STEPS, "checkpoint.async_save=true"),
    ),
    "fp8_training": GpuCheck(
        COMMANDS,
        "Do two steps with FP8 products in the actor and FP8 weights in the engine work, and do both compute alike?",
        "TransformerEngine's FP8 recipe does not take mrl's packed rows, or rounds far more than its formats do",
        "train without megatron.transformer.fp8; blockwise needs Hopper and CUDA 12.9, mxfp8 needs Blackwell",
        settings=FP8,
    ),
    "quickstart": GpuCheck(
        COMMANDS,
        "Does the README's first command learn to add?",
        "something between sampling and update is wrong, or the configuration does not suit this machine",
        "read the log; `mrl doctor` diagnoses the machine",
    ),
    "update": GpuCheck(
        JOB,
        "Tokens per second and MFU of an update, compared with plain Megatron-Core on the same batch",
        "training is slower than plain Megatron-Core",
        "`mrl train --dry-run` prints Megatron's arguments; megatron.transformer sets them",
        model="large",
        alone=True,
    ),
    "rollout": GpuCheck(
        COMMANDS,
        "Tokens per second of the native engine, compared with transformers' generate and the memory bandwidth",
        "sampling is slower than transformers",
        "see graphs_ratio on the page: below 1.2, CUDA graphs gain nothing and kernel launches are not the bottleneck",
        alone=True,
    ),
    "transport": GpuCheck(
        COMMANDS,
        "Speed of a weight sync within a GPU, compared with a memory copy of the same size",
        "the weight sync waits for many small copies, or for the host",
        "a larger rollout.checkpoint_engine.update_weights_bucket_megabytes",
        alone=True,
    ),
    "links": GpuCheck(
        JOB,
        "Are NCCL's sums and messages between GPUs correct, and how fast?",
        "ranks would wait forever, or train on wrong sums",
        "`mrl doctor` under the same launcher; NCCL_DEBUG=INFO",
        num_ranks=SEVERAL,
        alone=True,
    ),
    "parity_tp2": GpuCheck(
        JOB,
        "Parity with tensor and sequence parallelism over two GPUs",
        "the parallel layout changes the result",
        NO_TRAIN,
        num_ranks=SEVERAL,
        settings=TOGETHER,
    ),
    "parity_pp2": GpuCheck(
        JOB,
        "Parity with two pipeline stages",
        "the parallel layout changes the result",
        NO_TRAIN,
        num_ranks=SEVERAL,
        settings=("parallel.pipeline_model_parallel_size=2",),
    ),
    "parity_ep2": GpuCheck(
        JOB,
        "Parity of a MoE model with its experts on two GPUs",
        "the parallel layout changes the result",
        NO_TRAIN,
        num_ranks=SEVERAL,
        model="experts",
        settings=("parallel.expert_model_parallel_size=2",),
    ),
    "shared_cp2": GpuCheck(
        JOB,
        "Shared prompts computed once, with context parallelism over two GPUs",
        "keys of the other GPU are missing or in the wrong order",
        "actor.use_prefix_grouper=false, which uses TransformerEngine's own ring",
        num_ranks=SEVERAL,
        settings=("parallel.context_parallel_size=2",),
        alone=True,
    ),
    "logprobs_tp2": GpuCheck(
        JOB,
        "Engine compared with actor, with the engine on two GPUs: weight sync over NCCL, all-reduce in CUDA graphs",
        "the weight sync between GPUs or the engine's all-reduce is wrong",
        "rollout.enforce_eager=true, or rollout.tensor_model_parallel_size=1",
        num_ranks=SEVERAL,
        settings=("rollout.tensor_model_parallel_size=2", "rollout.enforce_eager=false"),
    ),
    "transport_2": GpuCheck(
        COMMANDS,
        "Speed of a weight sync between two GPUs",
        "the link between the GPUs is not NVLink, or NCCL does not use it",
        "nvidia-smi topo -m; NCCL_DEBUG=INFO",
        num_ranks=SEVERAL,
        alone=True,
    ),
}

PAGE = Page("mrl on this GPU", "acceptance-gpu", CHECKS, {})
