"""FP8 training: the fields of `megatron.transformer` that turn it on, and the row counts that its products need.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mrl.config.megatron_fields.table import default_value
from mrl.parallel_layout import ParallelLayout

ROW_ALIGNMENT = {"tensorwise": 16, "mxfp8": 32, "blockwise": 128}
"""Recipe -> divisor of the number of rows of every product on a rank."""
WIDTH_ALIGNMENT = {"tensorwise": 16, "mxfp8": 32, "blockwise": 16}
"""Recipe -> divisor of a rank's input and output size of every linear layer."""
FIELDS = ("fp8", "fp8_recipe", "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


@dataclass(frozen=True)
class Fp8Training:
    """Settings of FP8 training.

    Attributes:
        format: "e4m3", or "hybrid" for gradients in e5m2.
        recipe: Megatron's `fp8_recipe`: how scales are chosen.
        first_plain: Number of first layers that are computed without FP8.
        last_plain: Number of last layers that are computed without FP8.
    """

    format: str
    recipe: str
    first_plain: int = 0
    last_plain: int = 0


def fp8_training(transformer: Mapping[str, Any]) -> Fp8Training | None:
    """Returns the FP8 settings in `megatron.transformer`; None: products are not quantized."""
    if not transformer.get("fp8"):
        return None
    values = {name: transformer.get(name, default_value("transformer", name)) for name in FIELDS}
    plain = (values["num_layers_at_start_in_bf16"], values["num_layers_at_end_in_bf16"])
    return Fp8Training(values["fp8"], values["fp8_recipe"], *(plain if values["first_last_layers_bf16"] else (0, 0)))


def smallest_row_unit(grid: ParallelLayout) -> int:
    """Returns the divisor of the number of rows that the layout needs.

    Sequence parallelism shards the rows, and context parallelism cuts them into two segments for each rank.
    """
    return grid.tp * (2 * grid.cp if grid.cp > 1 else 1)


def row_unit(grid: ParallelLayout, transformer: Mapping[str, Any]) -> int:
    """Returns the divisor of a microbatch's number of rows, before context parallelism splits them.

    With FP8 a rank's shard of the rows must be aligned: TransformerEngine quantizes it before it is gathered.

    Args:
        grid: Parallel layout.
        transformer: Section `megatron.transformer`.
    """
    unit, fp8 = smallest_row_unit(grid), fp8_training(transformer)
    if fp8 is None:
        return unit
    return math.lcm(unit, grid.tp * grid.cp * ROW_ALIGNMENT.get(fp8.recipe, max(ROW_ALIGNMENT.values())))
