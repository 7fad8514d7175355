"""The checks of a GPU: what each asks, in which job, what it means that one fails, what to do; in the page's order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from acceptance.page import Page
from acceptance.result import Check

JOB, COMMANDS = "job", "commands"
"""Sessions: a job that has come up, or a process that starts mrl's own commands."""

SEVERAL = 2
"""Ranks of the checks that need several."""

TOGETHER = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
AWAY = tuple(f"actor.{part}_offload=true" for part in ("param", "grad", "optimizer"))
STEPS = ("train.num_steps=2", "checkpoint.interval=1")
NO_TRAIN = "do not train on this machine until it is found; send the page and the log"


@dataclass(frozen=True)
class GpuCheck(Check):
    """One line of the page.

    Attributes:
        num_ranks: Ranks of the session, each on a GPU of its own.
        model: "dense" and "experts" are small and have a folder with weights; "large" fills a GPU.
        settings: Overrides of the session.
        alone: It measures time or memory of the device, so that nothing else may run.
        after: Check whose findings it reads; "": none.
    """

    num_ranks: int = 1
    model: Literal["dense", "experts", "large"] = "dense"
    settings: tuple[str, ...] = ()
    alone: bool = False
    after: str = ""


CHECKS: dict[str, GpuCheck] = {
    "device": GpuCheck(
        COMMANDS,
        "Is the device there, does it compute as fast as it should, and does TransformerEngine, where it is installed, "
        "import?",
        "without TransformerEngine the actor has Megatron's local layers: half as fast, experts far slower; a slow "
        "device is shared, hot or throttled",
        "install `.[gpu]` as README says, against the torch that is there; look at nvidia-smi",
        alone=True,
    ),
    "attention": GpuCheck(
        COMMANDS,
        "Does torch's attention cost more for a shape that was never seen, or keep all scores in memory?",
        "every step has new shapes: updates without TransformerEngine, prefills and eager decoding would be many times "
        "slower, or run out of memory with long sequences",
        "`torch.backends.cuda` tells which kernels are on; look at the figures of each kind on the page",
        alone=True,
    ),
    "parity": GpuCheck(
        JOB,
        "Are the actor's log-probabilities, loss and gradient norm those of transformers in fp32?",
        "the actor computes another model, or another gradient, than its weights say",
        f"try actor.transformer_impl=local; {NO_TRAIN}",
    ),
    "parity_local": GpuCheck(
        JOB,
        "The same of Megatron's local layers: is it TransformerEngine, or what is around it?",
        "what both share is wrong: packing, layout or weights",
        NO_TRAIN,
        settings=("actor.transformer_impl=local",),
    ),
    "shared": GpuCheck(
        JOB,
        "The same of samples whose prompt is computed once, and how much time that saves",
        "attention of queries to more keys is not what TransformerEngine says, or copies of keys are wrong",
        "actor.use_prefix_grouper=false",
        alone=True,
    ),
    "experts": GpuCheck(
        JOB,
        "The same of a mixture of experts, with grouped products",
        "experts, their order or their routing are not those of the weights",
        f"try actor.transformer_impl=local; {NO_TRAIN}",
        model="experts",
    ),
    "refit": GpuCheck(
        JOB,
        "Do greedy answers stay under a refit of the same weights, change with others, and come back?",
        "samples would not be those of the actor",
        NO_TRAIN,
        settings=("rollout.enforce_eager=true",),
    ),
    "logprobs": GpuCheck(
        JOB,
        "Are the engine's log-probabilities, sampled with CUDA graphs, those that the actor computes?",
        "policy gradients would be of another distribution",
        "rollout.enforce_eager=true; if it stays, algorithm.rollout_correction.bypass_mode=false",
        settings=("rollout.enforce_eager=false",),
    ),
    "experts_logprobs": GpuCheck(
        JOB,
        "The same of a mixture of experts: grouped products inside CUDA graphs",
        "policy gradients would be of another distribution",
        "rollout.enforce_eager=true; torch 2.10 or newer has the grouped product",
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
        "Are the answers with CUDA graphs those without, also after refits?",
        "captured graphs compute with old weights or addresses",
        "rollout.enforce_eager=true",
        settings=("rollout.enforce_eager=false", "rollout.free_cache_engine=false"),
        after="refit",
    ),
    "graphs_asleep": GpuCheck(
        JOB,
        "The same while the engine's memory is given back between samplings, as a training step does",
        "a graph reads memory that came back at another address",
        "rollout.enforce_eager=true, or rollout.free_cache_engine=false where actor and engine fit",
        settings=("rollout.enforce_eager=false", "rollout.free_cache_engine=true"),
        after="refit",
    ),
    "cycles": GpuCheck(
        JOB,
        "Does the memory return over five cycles of waking, sampling, sleeping and training, do the answers stay, and "
        "are CUDA graphs captured once?",
        "each step would take more memory until none is left, or more time",
        "rollout.enforce_eager=true tells whether it is the graphs; a lower rollout.gpu_memory_utilization gives room",
        settings=("rollout.free_cache_engine=true",),
        alone=True,
    ),
    "offload": GpuCheck(
        JOB,
        "Does offloading free the actor's bytes, take as many of the host and no more, and bring the same back?",
        "actor and engine do not fit on one GPU, or the host runs out of memory",
        "actor.*_offload=false where both fit; `mrl plan` says what is needed",
        model="large",
        settings=AWAY,
        alone=True,
    ),
    "commit": GpuCheck(
        COMMANDS,
        "Is the step after a resume the step that would have come, metric by metric?",
        "a commit does not hold all of the run's state",
        "a resumed run goes on as another run; do not rely on requeueing until it is found",
        settings=STEPS,
    ),
    "commit_async": GpuCheck(
        COMMANDS,
        "The same of commits that are written while training goes on, and how long training waits for them",
        "a commit is of other weights than those of its step",
        "checkpoint.async_save=false",
        settings=(*STEPS, "checkpoint.async_save=true"),
    ),
    "quickstart": GpuCheck(
        COMMANDS,
        "Does the README's first command learn to add?",
        "something between sampling and the update is wrong, or the configuration does not fit this machine",
        "read the log; `mrl doctor` names what is wrong on the machine",
    ),
    "update": GpuCheck(
        JOB,
        "Tokens per second and MFU of an update, against plain Megatron-Core on the same batch",
        "training is slower than Megatron-Core's own",
        "`mrl train --dry-run` prints what Megatron is given: megatron.transformer has its switches",
        model="large",
        alone=True,
    ),
    "rollout": GpuCheck(
        COMMANDS,
        "Tokens per second of the native engine, against transformers' generate and the memory's bandwidth",
        "sampling is slower than transformers'",
        "the page has graphs_ratio: below 1.2 CUDA graphs gain nothing, and the CPU's launches are not the limit",
        alone=True,
    ),
    "transport": GpuCheck(
        COMMANDS,
        "Speed of a refit within a GPU, against a copy of its bytes in the GPU's memory",
        "a refit waits for many small copies, or for the host",
        "a larger rollout.checkpoint_engine.update_weights_bucket_megabytes",
        alone=True,
    ),
    "links": GpuCheck(
        JOB,
        "Does NCCL add and carry right between GPUs, and how fast?",
        "ranks would wait for ever, or train on wrong sums",
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
        "Parity of a mixture of experts with its experts on two GPUs",
        "the layout changes what is computed",
        NO_TRAIN,
        num_ranks=SEVERAL,
        model="experts",
        settings=("parallel.expert_model_parallel_size=2",),
    ),
    "shared_cp2": GpuCheck(
        JOB,
        "Samples whose prompt is computed once, with context parallelism over two GPUs",
        "keys of the other GPU do not come, or not in their order",
        "actor.use_prefix_grouper=false: TransformerEngine's own ring",
        num_ranks=SEVERAL,
        settings=("parallel.context_parallel_size=2",),
        alone=True,
    ),
    "logprobs_tp2": GpuCheck(
        JOB,
        "Engine against actor, the engine over two GPUs: its weights come over NCCL, its sums are in CUDA graphs",
        "the refit between GPUs or the engine's sums are wrong",
        "rollout.enforce_eager=true; else rollout.tensor_model_parallel_size=1",
        num_ranks=SEVERAL,
        settings=("rollout.tensor_model_parallel_size=2", "rollout.enforce_eager=false"),
    ),
    "transport_2": GpuCheck(
        COMMANDS,
        "Speed of a refit that sends between two GPUs",
        "the link between the GPUs is not NVLink, or NCCL does not use it",
        "nvidia-smi topo -m; NCCL_DEBUG=INFO",
        num_ranks=SEVERAL,
        alone=True,
    ),
}

PAGE = Page("mrl on this GPU", "acceptance-gpu", CHECKS, {})
