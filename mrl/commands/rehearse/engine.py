"""Selects the engine of a rehearsal and the sizes that its CPU kernels require.

The config's engine samples if it works on this machine's CPU, otherwise the default engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config import user_code
from mrl.config.config import RolloutConfig
from mrl.engines._capabilities import CpuRun, engine_capabilities
from mrl.models.base import ArchSpec
from mrl.parallel_layout import ParallelLayout

DEFAULT_ENGINE = RolloutConfig.name
"""`rollout.name` of the engine that runs on any machine."""

ANY_SIZES = CpuRun()


@dataclass(frozen=True)
class RehearsalEngine:
    """Engine of a rehearsal.

    Attributes:
        name: `rollout.name` of the reduced run.
        sizes: Sizes that the engine requires of the reduced model.
        why: Reason why the config's own engine cannot sample here; "": it can.
    """

    name: str = DEFAULT_ENGINE
    sizes: CpuRun = ANY_SIZES
    why: str = ""


def engine_for(rollout: RolloutConfig, reduced: ParallelLayout, arch: ArchSpec) -> RehearsalEngine:
    """Returns the engine for a rehearsal of `rollout` with the layout `reduced`; `arch`: the full model."""
    if user_code.is_user_code(rollout.name):
        return RehearsalEngine(why="it is not mrl's")
    found = engine_capabilities(rollout.name).on_cpu(reduced, arch)
    return RehearsalEngine(why=found.why_not) if found.why_not else RehearsalEngine(rollout.name, found)
