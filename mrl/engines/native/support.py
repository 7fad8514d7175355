"""Answers about the native engine before it starts (`engines/_support.py`). Imports no torch."""

from __future__ import annotations

from mrl.engines._support import CpuRun, EngineSupport
from mrl.engines.native.fields import FIELDS
from mrl.parallel_layout import Grid


class NativeSupport(EngineSupport):
    """The native engine needs no package and runs on any machine."""

    fields = FIELDS

    def on_cpu(self, reduced: Grid) -> CpuRun:
        """Returns that the engine samples on any CPU."""
        return CpuRun()


SUPPORT = NativeSupport()
