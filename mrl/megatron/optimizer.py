"""The optimizer of the actor: Megatron's AdamW over fp32 master weights.

Owns how config becomes Megatron's optimizer. What a checkpoint holds of it is in `optimizer_state.py`, what an Adam is
in `adam.py`; its learning rate is in `algorithms/functional/learning_rate.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from mrl.config.config import ActorConfig
from mrl.config.megatron_fields.table import own_value
from mrl.megatron.adam import adam_of, counts_by_parameter
from mrl.megatron.config_passthrough import given_to, objects


def build_optimizer(
    chunks: list[Any], actor: ActorConfig, *, bf16: bool, dtype: Any, given: Mapping[str, Any] | None = None
) -> Any:
    """Collective over the job: a Megatron optimizer for data-parallel chunks, no step taken.

    Args:
        chunks: Wrapped for data parallelism.
        actor: Rates, decays, clipping.
        bf16: Whether parameters are bfloat16.
        dtype: Of the parameters.
        given: Fields of `megatron.optimizer`, passed on.

    Raises:
        UserError: Megatron refuses what is given.
    """
    own = {
        "optimizer": "adam",
        "decoupled_weight_decay": True,
        "lr": actor.lr,
        "min_lr": 0.0,
        "weight_decay": actor.weight_decay,
        "adam_beta1": actor.adam_beta1,
        "adam_beta2": actor.adam_beta2,
        "adam_eps": actor.adam_eps,
        "clip_grad": actor.clip_grad or math.inf,  # without a bound the norm is still reported
        "bf16": bf16,
        "params_dtype": dtype,
        "use_distributed_optimizer": actor.use_distributed_optimizer,
        "optimizer_offload_fraction": own_value("optimizer", "optimizer_offload_fraction"),
    }
    with given_to("optimizer", given or ()):
        config = OptimizerConfig(**{**own, **objects("optimizer", given or {})})
        optimizer = get_megatron_optimizer(config, chunks)
    on_cpu = next(chunks[0].parameters()).device.type == "cpu"
    for part in optimizer.chained_optimizers:
        if on_cpu or counts_by_parameter(part.optimizer):
            for group in part.param_groups:
                group["fused"] = True  # one pass over memory; torch's default is one for each operation
    return optimizer


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """What Megatron's optimizer holds on this rank: master weights (in fp32 training views of the weights), moments."""
    for part in optimizer.chained_optimizers:
        yield from adam_of(part).tensors()


def reload_masters(optimizer: Any) -> None:
    """Must be called after the model's weights were written: master weights, where there are any, are these again."""
    for part in optimizer.chained_optimizers:
        adam_of(part).reload()
