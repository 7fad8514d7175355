"""Throughput metrics of a step: phase times, tokens per second, MFU, memory."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.distributed import launch
from mrl.distributed.collectives import broadcast_object
from mrl.engines.base import RolloutEngine
from mrl.observability import metrics as measure
from mrl.observability.timers import Timers
from mrl.trainer.run_plan import RunPlan


class Rates:
    """Throughput metrics of the run.

    Args:
        plan: Resolved and validated config.
        device: Device of this rank.
        timers: Phase timers of this rank.
        engine: Rollout engine of this rank; the statistics of the first rank that samples are used.
    """

    def __init__(self, plan: RunPlan, device: torch.device, timers: Timers, engine: RolloutEngine) -> None:
        self._plan, self._device, self._timers, self._engine = plan, device, timers, engine
        self._seq_lens: list[int] = []
        self._num_response_tokens = 0

    def record_step(self, prompt_lens_N: Tensor, response_lens_N: Tensor) -> None:
        """Records the lengths of all sequences of a step, over all ranks, in tokens."""
        self._seq_lens = (prompt_lens_N + response_lens_N).long().tolist()
        self._num_response_tokens = int(response_lens_N.sum())

    def metrics(self) -> dict[str, float]:
        """Collective over the job: returns the metrics of the last step."""
        timings, config, grid = self._timers.metrics(), self._plan.config, self._plan.grid
        rates = measure.throughput_metrics(
            timings,
            num_tokens=sum(self._seq_lens),
            num_response_tokens=self._num_response_tokens,
            world_size=grid.world_size,
        )
        known = self._device.type == "cuda" and config.model.dtype == "bfloat16"
        rates |= measure.mfu_metrics(
            self._plan.arch,
            self._seq_lens,
            update_s=timings.get("timing_s/update_actor", 0.0),
            num_passes=config.actor.ppo_epochs,
            world_size=len(grid.trainers),
            device_name=launch.device_name(self._device) if known else "",
            frozen=config.actor.lora.rank > 0,
        )
        stats = self._engine.stats()
        if grid.has_separate_rollout:
            stats = broadcast_object(grid.samplers.start, stats)
        engine = {f"perf/rollout/{name}": value for name, value in stats.items()}
        return timings | rates | engine | self._timers.ledger.metrics()
