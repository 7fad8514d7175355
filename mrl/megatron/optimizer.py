"""Construction of Megatron's AdamW over fp32 master weights.

Its state is in `adam.py`, its checkpoints in `optimizer_state.py`, its learning rate in
`algorithms/functional/learning_rate.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey
from torch import Tensor

from mrl.config.config import ActorConfig
from mrl.config.megatron_fields.table import default_value
from mrl.megatron.adam import adam_of, counts_by_parameter, trained_parts
from mrl.megatron.config_passthrough import explain_errors, megatron_values


def build_optimizer(
    chunks: list[Any], actor: ActorConfig, *, bf16: bool, dtype: Any, given: Mapping[str, Any] | None = None
) -> Any:
    """Collective over the job: creates a Megatron optimizer for data-parallel chunks.

    Args:
        chunks: Chunks wrapped for data parallelism.
        actor: Section with learning rate, weight decay, betas and clipping.
        bf16: True if parameters are bfloat16.
        dtype: Dtype of the parameters.
        given: Fields of `megatron.optimizer`, passed to Megatron.

    Raises:
        UserError: Megatron rejects the given fields.
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
        "optimizer_offload_fraction": default_value("optimizer", "optimizer_offload_fraction"),
    }
    with explain_errors("optimizer", given or ()):
        config = OptimizerConfig(**{**own, **megatron_values("optimizer", given or {})})
        options = {} if actor.lora.loraplus_lr_ratio == 1 else {"config_overrides": _faster_lora_b(config, actor)}
        optimizer = get_megatron_optimizer(config, chunks, **options)
    on_cpu = next(chunks[0].parameters()).device.type == "cpu"
    for part in trained_parts(optimizer):
        if on_cpu or counts_by_parameter(part.optimizer):
            for group in part.param_groups:
                group["fused"] = True  # one pass over memory instead of one per operation
    return optimizer


def _faster_lora_b(config: OptimizerConfig, actor: ActorConfig) -> dict[ParamKey, Any]:
    """Returns Megatron's overrides of parameter groups, with another learning rate for lora_B (LoRA+)."""
    faster = {"max_lr": actor.lr * actor.lora.loraplus_lr_ratio}
    return {**get_standard_config_overrides(config), ParamKey(name="*.lora_B*"): faster}


def learning_rate_of(group: Mapping[str, Any], rate: float, actor: ActorConfig) -> float:
    """Returns the learning rate of a parameter group in a step whose scheduled rate is `rate`."""
    is_faster = actor.lora.loraplus_lr_ratio != 1 and group["max_lr"] != actor.lr
    return rate * actor.lora.loraplus_lr_ratio if is_faster else rate


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Yields the optimizer's tensors on this rank: master weights (in fp32 training views of weights) and moments."""
    for part in trained_parts(optimizer):
        yield from adam_of(part).tensors()


def reload_masters(optimizer: Any) -> None:
    """Sets the master weights, if any, to the model's weights; must be called after those were written."""
    for part in trained_parts(optimizer):
        adam_of(part).reload()
