"""Functions of test_lora_peft.py that run in each rank; they import no peft."""

import torch
from torch.overrides import TorchFunctionMode

from mrl.algorithms.base import build
from mrl.config.config import AlgorithmConfig, RolloutConfig
from tests.megatron.actors import (
    CONSTANT,
    fill_adapters,
    full_adapters,
    full_weights,
    make_batch,
    make_policy,
    own_part,
    scores,
)

STEPS = 2


CASTS = (torch.Tensor.to, torch.Tensor.type)


class KeepsFloat64(TorchFunctionMode):
    """Computes in float64 what norms, routers and attention ask for in float32 although their input is float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        casts = function is torch.Tensor.float or (function in CASTS and args[1:] == (torch.float32,))
        if casts and args[0].dtype == torch.float64:
            return args[0]
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") == torch.float32 and args and getattr(args[0], "dtype", None) == torch.float64:
            kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def trained(arch, grid, lora):
    """Weights and adapters, scores, and the gradients and adapters of each of two supervised steps."""
    actor = {"lora": lora, "use_distributed_optimizer": False, "moe_router_dtype": "fp64"}
    # Megatron's buffers and clipping would otherwise be float32
    megatron = {"ddp": {"grad_reduce_in_fp32": False}, "optimizer": {"clip_grad": 0.0}}
    policy = make_policy(arch, grid, dtype="float64", actor=actor, megatron=megatron)
    fill_adapters(policy)
    policy.start_optimizer(CONSTANT)
    weights, adapters, found = full_weights(policy), full_adapters(policy), []
    with KeepsFloat64():
        scored = scores(policy, make_batch())
        for step in range(STEPS):
            batch = own_part(make_batch(seed=step), policy)
            policy.update(batch, build(AlgorithmConfig(name="sft"), RolloutConfig(n=1)))
            found.append((full_adapters(policy, gradients=True), full_adapters(policy)))
    return weights, adapters, scored[0], found
