"""Table of the GPU checks: question, job, meaning of a failure, and remedy, in the order of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from acceptance.page import Page
from acceptance.result import Check

JOB, COMMANDS = "job", "commands"
"""Sessions: a started job, or a process that starts mrl's own commands."""

SEVERAL = 2
"""Ranks of the checks that need several."""

TOGETHER = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
AWAY = tuple(f"actor.{part}_offload=true" for part in ("param", "grad", "optimizer"))
STEPS = ("train.num_steps=2", "checkpoint.interval=1")
NO_TRAIN = "do not train on this machine until the cause is found; send the report and the log"


@dataclass(frozen=True)
class GpuCheck(Check):
    """Check of a GPU, a line of the report.

    Attributes:
        num_ranks: Ranks of the session, each on its own GPU.
        model: "dense" and "experts" are small and have a folder with weights; "large" fills a GPU.
        settings: Overrides of the session.
        alone: True if it measures time or memory, so that nothing else may run.
        after: Check whose results it reads; "": none.
    """

    num_ranks: int = 1
    model: Literal["dense", "experts", "large"] = "dense"
    settings: tuple[str, ...] = ()
    alone: bool = False
    after: str = ""


CHECKS: dict[str, GpuCheck] = {
    "device": GpuCheck(
        COMMANDS,
        "Is there a device, is it as fast as it should be, and can TransformerEngine be imported, if it is installed?",
        "without TransformerEngine the actor has Megatron's local layers: half as fast, experts far slower; a slow "
        "device is shared, hot or throttled",
        "install `.[gpu]` as in README, for the installed torch; check nvidia-smi",
        alone=True,
    ),
    "attention": GpuCheck(
        COMMANDS,
        "Is torch's attention slower for new shapes, or does it store all scores?",
        "every step has new shapes: updates without TransformerEngine, prefills and eager decoding would be many times "
        "slower, or run out of memory with long sequences",
        "check in `torch.backends.cuda` which kernels are enabled; see the figures of each kind in the report",
        alone=True,
    ),
    "parity": GpuCheck(
        JOB,
        "Are the actor's log-probabilities, loss and gradient norm those of transformers in fp32?",
        "the actor computes another model or another gradient",
        f"try actor.transformer_impl=local; {NO_TRAIN}",
    ),
    "parity_local": GpuCheck(
        JOB,
        "The same with Megatron's local layers: is TransformerEngine the cause?",
        "the parts that both share are wrong: packing, layout or weights",
        NO_TRAIN,
        settings=("actor.transformer_impl=local",),
    ),
    "shared": GpuCheck(
        JOB,
        "The same with a shared prompt prefix, and how much time that saves",
        "TransformerEngine's attention with more keys than queries is wrong, or copies of keys are",
        "actor.use_prefix_grouper=false",
        alone=True,
    ),
    "experts": GpuCheck(
        JOB,
        "The same for an MoE model, with a grouped GEMM",
        "experts, their order or their routing are wrong",
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
        "Do the engine's log-probabilities, sampled with CUDA graphs, equal the actor's?",
        "policy gradients would be those of another distribution",
        "rollout.enforce_eager=true; if that does not help, algorithm.rollout_correction.bypass_mode=false",
        settings=("rollout.enforce_eager=false",),
    ),
    "experts_logprobs": GpuCheck(
        JOB,
        "The same for an MoE model: grouped GEMM inside CUDA graphs",
        "policy gradients would be those of another distribution",
        "rollout.enforce_eager=true; torch 2.10 or newer has the grouped GEMM",
        model="experts",
        settings=("rollout.enforce_eager=false",),
    ),
    "contract": GpuCheck(
        JOB,
        "The same with a temperature and top_p",
        "policy gradients under this sampling would be wrong",
        "temperature 1 without truncation, or algorithm.rollout_correction.bypass_mode=false",
        settings=("rollout.temperature=0.7", "rollout.top_p=0.9"),
    ),
    "graphs": GpuCheck(
        JOB,
        "Are responses the same with and without CUDA graphs, also after weight syncs?",
        "captured graphs compute with old weights or addresses",
        "rollout.enforce_eager=true",
        settings=("rollout.enforce_eager=false", "rollout.free_cache_engine=false"),
        after="refit",
    ),
    "graphs_asleep": GpuCheck(
        JOB,
        "The same while the engine's memory is freed between samplings, as in a training step",
        "a graph reads memory that was remapped at another address",
        "rollout.enforce_eager=true, or rollout.free_cache_engine=false where actor and engine fit",
        settings=("rollout.enforce_eager=false", "rollout.free_cache_engine=true"),
        after="refit",
    ),
    "cycles": GpuCheck(
        JOB,
        "Over five cycles of waking, sampling, sleeping and training: is all memory freed, do responses stay the same, "
        "and are CUDA graphs captured once?",
        "each step would take more memory until none is left, or more time",
        "try rollout.enforce_eager=true to see whether graphs are the cause; lower rollout.gpu_memory_utilization",
        settings=("rollout.free_cache_engine=true",),
        alone=True,
    ),
    "offload": GpuCheck(
        JOB,
        "Does offloading free the actor's memory, take no more of the host, and restore the same weights?",
        "actor and engine do not fit on one GPU, or the host runs out of memory",
        "actor.*_offload=false if both fit; `mrl plan` shows the memory needed",
        model="large",
        settings=AWAY,
        alone=True,
    ),
    "commit": GpuCheck(
        COMMANDS,
        "Does a resumed run repeat the step, metric by metric?",
        "a checkpoint does not contain all of the run's state",
        "a resumed run continues differently; do not rely on requeueing until the cause is found",
        settings=STEPS,
    ),
    "commit_async": GpuCheck(
        COMMANDS,
        "The same for asynchronous checkpoints, and how long training waits for them",
        "a checkpoint has weights of another step",
        "checkpoint.async_save=false",
        settings=(*STEPS, "checkpoint.async_save=true"),
    ),
    "quickstart": GpuCheck(
        COMMANDS,
        "Does the README's first command learn to add?",
        "something between sampling and the update is wrong, or the configuration does not fit this machine",
        "read the log; run `mrl doctor` to check the machine",
    ),
    "update": GpuCheck(
        JOB,
        "Tokens per second and MFU of an update, against plain Megatron-Core on the same batch",
        "training is slower than Megatron-Core's own",
        "`mrl train --dry-run` prints Megatron's settings; change them in megatron.transformer",
        model="large",
        alone=True,
    ),
    "rollout": GpuCheck(
        COMMANDS,
        "Tokens per second of the native engine, against transformers' generate and the memory's bandwidth",
        "sampling is slower than transformers'",
        "see graphs_ratio in the report: below 1.2, CUDA graphs gain nothing and kernel launches are not the limit",
        alone=True,
    ),
    "transport": GpuCheck(
        COMMANDS,
        "Speed of a weight sync within a GPU, against a copy of its bytes in the GPU's memory",
        "a weight sync waits for many small copies, or for the host",
        "raise rollout.checkpoint_engine.update_weights_bucket_megabytes",
        alone=True,
    ),
    "links": GpuCheck(
        JOB,
        "Are NCCL's sums and messages between GPUs right, and how fast are they?",
        "ranks would hang, or train on wrong sums",
        "`mrl doctor` under the same launcher; NCCL_DEBUG=INFO",
        num_ranks=SEVERAL,
        alone=True,
    ),
    "parity_tp2": GpuCheck(
        JOB,
        "Parity with tensor and sequence parallelism over two GPUs",
        "the layout changes what is computed",
        NO_TRAIN,
        num_ranks=SEVERAL,
        settings=TOGETHER,
    ),
    "parity_pp2": GpuCheck(
        JOB,
        "Parity with two pipeline stages",
        "the layout changes what is computed",
        NO_TRAIN,
        num_ranks=SEVERAL,
        settings=("parallel.pipeline_model_parallel_size=2",),
    ),
    "parity_ep2": GpuCheck(
        JOB,
        "Parity of an MoE model with its experts on two GPUs",
        "the layout changes what is computed",
        NO_TRAIN,
        num_ranks=SEVERAL,
        model="experts",
        settings=("parallel.expert_model_parallel_size=2",),
    ),
    "shared_cp2": GpuCheck(
        JOB,
        "Parity with a shared prompt prefix and context parallelism over two GPUs",
        "keys of the other GPU are missing or in the wrong order",
        "actor.use_prefix_grouper=false: TransformerEngine's own ring",
        num_ranks=SEVERAL,
        settings=("parallel.context_parallel_size=2",),
        alone=True,
    ),
    "logprobs_tp2": GpuCheck(
        JOB,
        "Engine against actor, the engine on two GPUs: weights over NCCL, all-reduces in CUDA graphs",
        "the weight sync between GPUs or the engine's all-reduces are wrong",
        "rollout.enforce_eager=true, otherwise rollout.tensor_model_parallel_size=1",
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
