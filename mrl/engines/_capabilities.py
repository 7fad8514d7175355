"""Capabilities and requirements of an engine that mrl reads without starting it: `CAPABILITIES` of its folder.

A new engine derives from `EngineCapabilities` where the defaults do not fit; no file outside its folder names it.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from mrl.config import registry
from mrl.config.config import Config, RolloutConfig
from mrl.engines._field_support import Fields
from mrl.models.base import ArchSpec
from mrl.parallel_layout import ParallelLayout

if TYPE_CHECKING:
    from mrl.engines._memory_plan import MemoryPlan


class EngineArguments(Protocol):
    """Rules of an engine's own arguments, `rollout.engine_kwargs.<name>`; usually a module."""

    EXAMPLE: str

    def refusals(self, rollout: RolloutConfig) -> Iterator[str]:
        """Yields a message for each argument that is unknown or that mrl sets itself."""


@dataclass(frozen=True)
class EnginePackage:
    """Python package that an engine needs.

    Attributes:
        extra: Extra of mrl's setup.py that installs it.
        distribution: Name of the distribution.
        module: Module that is imported to see whether it works.
        optional_requirements: Requirements of the distribution that text models can do without.
    """

    extra: str
    distribution: str
    module: str
    optional_requirements: tuple[str, ...] = ()


@dataclass(frozen=True)
class CpuRun:
    """Ability of an engine to sample on this machine's CPU, as a rehearsal needs.

    Attributes:
        why_not: Reason why it cannot; "": it can.
        head_dim: Smallest head dimension.
        width_multiple: Number that must divide the widths of a rank's matrices.
    """

    why_not: str = ""
    head_dim: int = 16
    width_multiple: int = 8


class EngineCapabilities:
    """Capabilities and requirements of an engine; the defaults are those of an engine without special needs.

    Attributes:
        fields: Effect of each field of `rollout`, and rejected values.
        arguments: Rules of `rollout.engine_kwargs.<name>`; None: the engine takes no arguments of its own.
        packages: Python packages, of which one must be installed.
        checks_weight_sync: Default of `rollout.checkpoint_engine.canary`.
        has_pipeline_parallelism: A replica can have several pipeline stages.
        has_fixed_prompt_length: A prompt cannot exceed `rollout.prompt_length`, not even by a partial response.
        stores_adapters: The engine can store low-rank adapters beside the weights (`EngineSpec.lora`).
        scales_lora_b: It then stores lora_B multiplied by the scale.
        sees_own_device_only: Each rank must hide the other GPUs before torch enumerates them.
    """

    fields: Fields = MappingProxyType({})
    arguments: EngineArguments | None = None
    packages: tuple[EnginePackage, ...] = ()
    checks_weight_sync = False
    has_pipeline_parallelism = False
    has_fixed_prompt_length = False
    stores_adapters = False
    scales_lora_b = False
    sees_own_device_only = False

    def needs_mpi(self, rollout: RolloutConfig) -> bool:
        """Returns whether the ranks of the job must be started by MPI."""
        return False

    def check_launcher(self, rollout: RolloutConfig, launcher: str) -> None:
        """Raises UserError if ranks started by this launcher cannot form the replicas.

        Args:
            rollout: Config section `rollout`.
            launcher: Launcher as in `LauncherEnv.launcher`.
        """

    def check_hosts(self, grid: ParallelLayout, gpus_per_node: int) -> None:
        """Raises UserError if a replica's ranks cannot be placed on nodes with this number of GPUs."""

    def config_errors(self, rollout: RolloutConfig) -> Iterator[str]:
        """Yields a message for each rule between settings that the config breaks, beyond those in `fields`."""
        return iter(())

    def model_errors(self, config: Config, arch: ArchSpec) -> Iterator[str]:
        """Yields a message for each rule between the config and the model that is broken."""
        return iter(())

    def check_installed(self) -> None:
        """Raises UserError, with what to install, if a run on this machine could not import the engine."""

    def describe(self, name: str) -> str:
        """Returns the engine's name, and what is installed here, for a dry run."""
        return name

    def package(self, *, has_gpu: bool) -> EnginePackage | None:
        """Returns the package that a machine with or without a GPU needs; None: none."""
        return self.packages[0] if self.packages else None

    def broken_requirements(self) -> str:
        """Returns a message about installed packages that break the import of the engine's; "": there are none."""
        return ""

    def memory_plan(self) -> MemoryPlan:
        """Returns the predicted sizes of the engine; the default is the prediction for the default engine."""
        return engine_capabilities(RolloutConfig.name).memory_plan()

    def on_cpu(self, reduced: ParallelLayout, arch: ArchSpec) -> CpuRun:
        """Returns whether the engine samples a smaller model like `arch` on this CPU with the layout `reduced`."""
        return CpuRun("its CAPABILITIES do not say that it runs on a CPU")


def has_effective_windows(config: Config, arch: ArchSpec) -> bool:
    """Returns whether a sliding window hides a token of the run's longest sequence."""
    return arch.sliding_window is not None and arch.sliding_window < config.rollout.max_sequence_length


def engine_capabilities(name: str) -> EngineCapabilities:
    """Returns the capabilities of an engine, `CAPABILITIES` of its module.

    Args:
        name: `rollout.name`. A path to user code has the defaults; so have an engine that defines no `CAPABILITIES`,
            and an unknown name, which validation reports.
    """
    if name not in registry.names("engines"):
        return EngineCapabilities()
    found: EngineCapabilities = registry.find("engines", name, "CAPABILITIES", EngineCapabilities())
    return found


def memory_plan(config: Config) -> MemoryPlan:
    """Returns the predicted sizes of a config's engine."""
    return engine_capabilities(config.rollout.name).memory_plan()


def engine_packages() -> dict[str, EnginePackage]:
    """Returns the packages of all engines, by the extra that installs them."""
    engines = (engine_capabilities(name) for name in registry.names("engines"))
    return {package.extra: package for engine in engines for package in engine.packages}


def engines_with_arguments() -> list[str]:
    """Returns the names of the engines that take arguments of their own."""
    return [name for name in registry.names("engines") if engine_capabilities(name).arguments is not None]
