"""Capabilities of TensorRT-LLM's LLM API and built engines, read before they start (`engines/_capabilities.py`).

Imports neither torch nor TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mrl.config.config import Config, RolloutConfig
from mrl.engines._capabilities import EngineCapabilities, EnginePackage, has_effective_windows
from mrl.engines.trtllm import (
    built_fields,
    engine_dir,
    engine_kwargs,
    fields,
    fp8_support,
    package_signature,
    positions,
    routing,
)
from mrl.engines.trtllm.rank_placement import check_hosts
from mrl.errors import to_install
from mrl.models.base import ArchSpec
from mrl.parallel_layout import ParallelLayout

if TYPE_CHECKING:
    from mrl.engines._memory_plan import MemoryPlan


def structure_errors(config: Config, arch: ArchSpec) -> Iterator[str]:
    """Yields a message for layers that mrl does not map, attention sinks, and sequences longer than a window."""
    if arch.mla is not None:
        yield (
            f"rollout.name={config.rollout.name}: '{arch.family}' has multi-head latent attention, which mrl does not "
            "support with TensorRT-LLM. Use rollout.name=native."
        )
        return
    if arch.linear_attention is not None or arch.output_gate:
        yield (
            f"rollout.name={config.rollout.name}: '{arch.family}' has linear attention and output gates, which mrl "
            "does not support with TensorRT-LLM. Use rollout.name=native."
        )
        return
    if arch.post_norms:
        yield (
            f"rollout.name={config.rollout.name}: a {arch.family} model has norms after attention and MLP, which mrl "
            "does not support with TensorRT-LLM. Use rollout.name=native or vllm."
        )
        return
    if arch.moe is not None and arch.moe.dense_layers:
        yield (
            f"rollout.name={config.rollout.name}: {len(arch.moe.dense_layers)} of the model's {arch.num_layers} layers "
            "have a dense MLP instead of experts, which mrl does not support with TensorRT-LLM. Use "
            "rollout.name=native or vllm."
        )
    if arch.attention_sinks:
        yield (
            f"rollout.name={config.rollout.name}: '{arch.family}' has attention sinks, which mrl does not support with "
            "TensorRT-LLM. Use rollout.name=native or vllm."
        )
    if has_effective_windows(config, arch):
        yield (
            f"rollout.name={config.rollout.name}: the model has a sliding window of {arch.sliding_window} tokens, "
            "which mrl does not set in TensorRT-LLM. Use rollout.name=native, or sequences (rollout.prompt_length + "
            f"rollout.response_length) of at most {arch.sliding_window} tokens."
        )


class TrtllmCapabilities(EngineCapabilities):
    """Common capabilities of the LLM API and built engines: replicas of several ranks communicate over MPI."""

    packages = (EnginePackage("trtllm", "tensorrt-llm", "tensorrt_llm"),)
    checks_weight_sync = True

    def needs_mpi(self, rollout: RolloutConfig) -> bool:
        """Returns whether a replica has several ranks."""
        return fields.needs_mpi(rollout)

    def check_launcher(self, rollout: RolloutConfig, launcher: str) -> None:
        """Raises UserError if a replica of several ranks was not started by MPI."""
        fields.check_launcher(rollout, launcher)

    def check_hosts(self, grid: ParallelLayout, gpus_per_node: int) -> None:
        """Raises UserError if a replica is neither inside a node nor on complete nodes."""
        for first in grid.samplers[:: grid.rollout_size]:
            check_hosts(first, grid.rollout_size, gpus_per_node, gpus_per_node)

    def describe(self, name: str) -> str:
        """Returns the engine's name, and whether TensorRT-LLM is installed here."""
        if package_signature.is_installed():
            return name
        advice = f"Install it: {to_install('trtllm')}; or use rollout.name=native."
        return f"{name}: TensorRT-LLM is not installed here. {advice}"


class LlmCapabilities(TrtllmCapabilities):
    """Capabilities of the LLM API, which loads PyTorch models."""

    fields = fields.FIELDS
    arguments = engine_kwargs
    sees_own_device_only = True

    def config_errors(self, rollout: RolloutConfig) -> Iterator[str]:
        """Yields a message for each of its own arguments that prevents recording experts."""
        return routing.refusals(rollout)

    def model_errors(self, config: Config, arch: ArchSpec) -> Iterator[str]:
        """Yields a message for structures, MoE arguments of a dense model, and rules of FP8 and positions."""
        yield from structure_errors(config, arch)
        if arch.mla is not None:  # the other rules read sizes that such a model does not have
            return
        if arch.moe is None:
            yield from engine_kwargs.expert_refusals(config.rollout)
        yield from fp8_support.refusals(config, arch)
        yield from positions.refusals(config, arch)

    def memory_plan(self) -> MemoryPlan:
        """Returns the predicted sizes of the engine."""
        from mrl.engines.trtllm.memory_plan import LlmMemoryPlan

        return LlmMemoryPlan()


class BuiltCapabilities(TrtllmCapabilities):
    """Capabilities of built engines, whose shapes are fixed when they are built."""

    fields = built_fields.FIELDS
    has_pipeline_parallelism = True
    has_fixed_prompt_length = True

    def model_errors(self, config: Config, arch: ArchSpec) -> Iterator[str]:
        """Yields a message for structures, and if `rollout.engine_dir` does not fit the run, or no engine can."""
        broken = [*structure_errors(config, arch)]
        if arch.mla is None:
            broken += positions.built_refusals(config, arch)
        return iter(broken or engine_dir.engine_errors(config, arch))

    def memory_plan(self) -> MemoryPlan:
        """Returns the predicted sizes of the engine."""
        from mrl.engines.trtllm.memory_plan import BuiltMemoryPlan

        return BuiltMemoryPlan()


CAPABILITIES = LlmCapabilities()
BUILT_CAPABILITIES = BuiltCapabilities()
