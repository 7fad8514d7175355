"""Memory of a rank's optimizer, by the data types of its states: on the device, in host memory, and in a checkpoint.

`memory.py` computes how many parameters a rank owns.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config.config import Config
from mrl.config.megatron_fields.table import default_value
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
"""Fields of `megatron.optimizer` that this file accounts for."""
FP32 = 4
MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class OptimizerMemory:
    """Memory of the optimizer on a rank, bytes.

    Attributes:
        device: Master weights and moments on the device.
        step: Additional peak of a step: 2-byte states converted to float32, for all parameters with one weight decay at
            a time.
        host: States and gradients in flight in host memory; at the start copies of the model's weights. The rounding of
            torch's pinned-memory allocator is not included.
        saved: States that the rank writes into a checkpoint.
    """

    device: int
    step: int
    host: int
    saved: int


def optimizer_memory(config: Config, dtype: str, *, owned: int, largest: int, held: int) -> OptimizerMemory:
    """Returns the memory of a rank's optimizer.

    Args:
        config: Config with sections actor and megatron.
        dtype: Data type of the parameters.
        owned: Number of parameters whose states the rank owns.
        largest: The larger of its dense and expert parameters, which are stepped separately.
        held: Number of trained parameters of the model on the rank.
    """
    in_fp32 = dtype == "float32"
    masters = 0 if in_fp32 else FP32
    # a distributed optimizer saves fp32 weights as master weights too
    saved = owned * (masters if not config.actor.use_distributed_optimizer else FP32)
    wide = 0 if in_fp32 or config.megatron.ddp.get("grad_reduce_in_fp32", True) else FP32
    if not _field(config, "use_precision_aware_optimizer"):
        moments = owned * 2 * FP32
        return OptimizerMemory(owned * masters + moments, largest * wide, 0, saved + moments)
    if _field(config, "optimizer_cpu_offload"):
        return _hybrid(config, owned, held, masters, saved)
    states = [_bytes(config, name) for name in MOMENTS]
    saved += owned * sum(FP32 if _dtype(config, name) == "float16" else _bytes(config, name) for name in MOMENTS)
    master = _bytes(config, "main_params_dtype")
    cut = not in_fp32 and master == FP32 and _field(config, "store_param_remainders")
    low = sum(size < FP32 for size in (*states, master))
    device = owned * (sum(states) + (ITEM_BYTES["bfloat16"] if cut else master))
    return OptimizerMemory(device, largest * low * FP32, 0, saved)


def _hybrid(config: Config, owned: int, held: int, masters: int, saved: int) -> OptimizerMemory:
    """Returns the memory of Megatron's hybrid optimizer (CPU offload), with host gradients and initial copies."""
    away = round(owned * _field(config, "optimizer_offload_fraction"))
    moments = 2 * FP32
    starting = round((held + owned) * _field(config, "optimizer_offload_fraction")) * FP32
    host = max(away * (FP32 + moments + FP32), starting)
    wide = 0 if config.megatron.ddp.get("grad_reduce_in_fp32", True) else FP32
    device = (owned - away) * (masters + moments + wide)
    return OptimizerMemory(device, 0, host, saved + owned * moments)


def _field(config: Config, name: str) -> float:
    """Returns the value of an optimizer field or its default; flags as 1 or 0."""
    return float(config.megatron.optimizer.get(name, default_value("optimizer", name)))


def _dtype(config: Config, name: str) -> str:
    return DTYPES[config.megatron.optimizer.get(name, default_value("optimizer", name))]


def _bytes(config: Config, name: str) -> int:
    return BYTES[_dtype(config, name)]
