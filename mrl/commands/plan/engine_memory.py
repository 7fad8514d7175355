"""Memory of the run's rollout engine on a rank; `memory.py` combines it with that of the other models."""

from __future__ import annotations

import math

from mrl.engines._capabilities import memory_plan
from mrl.engines._memory_plan import Device, EngineMemory, PlannedRun
from mrl.rollout.async_schedule import RolloutSchedule
from mrl.trainer.run_plan import Resolved


def engine_memory(plan: Resolved, device: Device, *, weights: int, actor: int) -> EngineMemory:
    """Returns the memory of the run's engine on a rank.

    Args:
        plan: Resolved config of the run.
        device: Device of the rank.
        weights: Size of the engine's weights, from `MemoryPlan.weight_bytes`, bytes.
        actor: Actor memory on the device when the engine measures the free memory, bytes.
    """
    config, schedule = plan.config, RolloutSchedule.of(plan.config)
    num_samples = math.ceil(config.train.batch_size / plan.grid.num_replicas) * config.rollout.n
    most = schedule.max_in_flight * config.rollout.n if schedule.by_parts else num_samples
    run = PlannedRun(config, plan.arch, plan.grid, device, weights, actor, num_samples, most)
    return memory_plan(config).memory(run)
