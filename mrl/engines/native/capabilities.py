"""Capabilities of the native engine, read before it starts (`engines/_capabilities.py`). Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mrl.engines._capabilities import CpuRun, EngineCapabilities
from mrl.engines.native.fields import FIELDS
from mrl.models.base import ArchSpec
from mrl.parallel_layout import ParallelLayout

if TYPE_CHECKING:
    from mrl.engines._memory_plan import MemoryPlan


class NativeCapabilities(EngineCapabilities):
    """Capabilities of the native engine, which needs no package and runs on any machine."""

    fields = FIELDS
    stores_adapters = True

    def memory_plan(self) -> MemoryPlan:
        """Returns the predicted sizes of the engine."""
        from mrl.engines.native.memory_plan import NativeMemoryPlan

        return NativeMemoryPlan()

    def on_cpu(self, reduced: ParallelLayout, arch: ArchSpec) -> CpuRun:
        """Returns that the engine samples on any CPU."""
        return CpuRun()


CAPABILITIES = NativeCapabilities()
