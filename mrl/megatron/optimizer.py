"""The optimizer of the actor: Megatron's AdamW over fp32 master weights, and its learning rate.

Owns how config becomes Megatron's optimizer, and the schedule. What a checkpoint holds of it is in `checkpoint.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from mrl.config import ActorConfig


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up from 0, then constant, or down to `minimum` at the last step.

    Attributes:
        peak: After warm-up.
        minimum: At the end of linear and cosine.
        shape: After warm-up.
        warmup_steps: Optimizer steps of the warm-up.
        num_steps: Optimizer steps in all.
    """

    peak: float
    minimum: float
    shape: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    num_steps: int

    def at(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.num_steps - 1 - self.warmup_steps))
        factor = 1 - progress if self.shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.minimum + (self.peak - self.minimum) * factor


def build_optimizer(chunks: list[Any], actor: ActorConfig, *, bf16: bool, dtype: Any) -> Any:
    """Collective over the job: a Megatron optimizer for data-parallel chunks, no step taken."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            decoupled_weight_decay=True,
            lr=actor.lr,
            min_lr=0.0,
            weight_decay=actor.weight_decay,
            adam_beta1=actor.adam_beta1,
            adam_beta2=actor.adam_beta2,
            adam_eps=actor.adam_eps,
            clip_grad=actor.clip_grad or math.inf,  # without a bound the norm is still reported
            bf16=bf16,
            params_dtype=dtype,
            use_distributed_optimizer=actor.use_distributed_optimizer,
        ),
        chunks,
    )
    if next(chunks[0].parameters()).device.type == "cpu":
        for group in optimizer.param_groups:
            group["fused"] = True  # one pass over memory; torch's default on a CPU is one for each operation
    return optimizer


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """What Megatron's optimizer holds on this rank: master weights (in fp32 training views of the weights), moments."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))
