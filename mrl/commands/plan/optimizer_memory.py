"""What the optimizer of a rank holds, by the types that the config gives its states.

Owns bytes of master weights and moments on the device and on the host, of what a step needs beside them, and of what a
checkpoint holds of them. How many parameters are a rank's is known to `memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config.config import Config
from mrl.config.megatron_fields.table import own_value
from mrl.config.megatron_fields.values import DTYPES
from mrl.resharding.copy_op import ITEM_BYTES

FIELDS = (
    "use_precision_aware_optimizer",
    "store_param_remainders",
    "main_params_dtype",
    "main_grads_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads",
)
"""Of `megatron.optimizer`, known here."""
FP32 = 4
MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of a rank.

    Attributes:
        device: Master weights and moments there.
        step: Most that a step needs there beside them: states of 2 bytes are made float32, those of all parameters that
            share a weight decay at a time.
        host: What lies in host memory: states, and gradients on their way; at the start copies of whole weights. What
            torch's allocator of pinned memory rounds up is not in it.
        saved: What the rank writes of it.
    """

    device: int
    step: int
    host: int
    saved: int


def optimizer_memory(config: Config, *, owned: int, largest: int, held: int) -> OptimizerMemory:
    """Of one rank.

    Args:
        config: Sections model, actor and megatron.
        owned: Parameters whose states are the rank's.
        largest: Of these, the larger part of the dense ones and those of experts, which are stepped apart.
        held: Parameters of the model that the rank holds.
    """
    in_fp32 = config.model.dtype == "float32"
    masters = 0 if in_fp32 else FP32
    # a distributed optimizer's fp32 weights are in the checkpoint as its master weights, too
    saved = owned * (masters if not config.actor.use_distributed_optimizer else FP32)
    wide = 0 if in_fp32 or config.megatron.ddp.get("grad_reduce_in_fp32", True) else FP32
    if not _of(config, "use_precision_aware_optimizer"):
        moments = owned * 2 * FP32
        return OptimizerMemory(owned * masters + moments, largest * wide, 0, saved + moments)
    if _of(config, "optimizer_cpu_offload"):
        return _hybrid(config, owned, held, masters, saved)
    states = [_bytes(config, name) for name in MOMENTS]
    saved += owned * sum(FP32 if _dtype(config, name) == "float16" else _bytes(config, name) for name in MOMENTS)
    master = _bytes(config, "main_params_dtype")
    cut = not in_fp32 and master == FP32 and _of(config, "store_param_remainders")
    low = sum(size < FP32 for size in (*states, master))
    device = owned * (sum(states) + (ITEM_BYTES["bfloat16"] if cut else master))
    return OptimizerMemory(device, largest * low * FP32, 0, saved)


def _hybrid(config: Config, owned: int, held: int, masters: int, saved: int) -> OptimizerMemory:
    """Megatron's hybrid: on the host also gradients, and at the start copies of the model's weights as they are."""
    away = round(owned * _of(config, "optimizer_offload_fraction"))
    moments = 2 * FP32
    starting = round((held + owned) * _of(config, "optimizer_offload_fraction")) * FP32
    host = max(away * (FP32 + moments + FP32), starting)
    wide = 0 if config.megatron.ddp.get("grad_reduce_in_fp32", True) else FP32
    device = (owned - away) * (masters + moments + wide)
    return OptimizerMemory(device, 0, host, saved + owned * moments)


def _of(config: Config, name: str) -> float:
    """A field that is given, or as it is without; whether it is on as 1 or 0."""
    return float(config.megatron.optimizer.get(name, own_value("optimizer", name)))


def _dtype(config: Config, name: str) -> str:
    return DTYPES[config.megatron.optimizer.get(name, own_value("optimizer", name))]


def _bytes(config: Config, name: str) -> int:
    return BYTES[_dtype(config, name)]
