"""What Megatron's DistributedOptimizer gets wrong about its own checkpoints.

Owns `repair`, applied once, needed on any device (megatron-core 0.16.1). The first three come with torch's Adam, that
is without TransformerEngine and Apex; the fourth is always there:

1. `sharded_state_dict` of an optimizer that never stepped asserts: it has no Adam state yet.
2. Loading "fully_reshardable" state raises KeyError 'step': the step lives in the parameter groups only.
3. `load_state_dict` gives all parameters ONE `step` tensor; Adam then advances it once per parameter, and everything
   after a resume is wrong without an error.
4. Saving "fully_reshardable" state leaves out the padding behind each bucket, but looks parameters up where they lie
   with it: behind a bucket that does not end at a multiple of 128 (the tied embedding has one of its own in a pipeline)
   master weights and moments are saved shifted, and the last of them as zeros.

Also owns `adapt`: experts spread over ranks have an optimizer of their own, so that what is not a tensor of it has
another form in the checkpoint of a job with expert parallelism than of one without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from mrl.errors import UserError

_REPAIRED = "_mrl_repaired"


def repair() -> None:
    """Replaces three methods of DistributedOptimizer; a second call does nothing."""
    if getattr(DistributedOptimizer, _REPAIRED, False):
        return
    sharded_state_dict = DistributedOptimizer.sharded_state_dict
    load_state_dict = DistributedOptimizer.load_state_dict
    set_state = DistributedOptimizer._set_main_param_and_optimizer_states

    def sharded_state_dict_with_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        make_adam_state(self)
        with _padding_kept(self):
            return sharded_state_dict(self, *args, **kwargs)

    def load_state_dict_with_own_steps(self: Any, state: dict[str, Any]) -> None:
        step = float(state["optimizer"]["param_groups"][0]["step"])
        with torch.no_grad():
            load_state_dict(self, state)
        for _, adam in _states(self):
            adam["step"] = torch.tensor(step)

    def set_state_with_step(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        adam = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in adam and "step" not in tensors:
            tensors = {**tensors, "step": adam["step"]}
        set_state(self, model_param, tensors)

    DistributedOptimizer.sharded_state_dict = sharded_state_dict_with_state
    DistributedOptimizer.load_state_dict = load_state_dict_with_own_steps
    DistributedOptimizer._set_main_param_and_optimizer_states = set_state_with_step
    setattr(DistributedOptimizer, _REPAIRED, True)


def adapt(loaded: dict[Any, Any], optimizer: Any) -> dict[Any, Any]:
    """The loaded state of a "fully_reshardable" checkpoint in the form that this layout's optimizer reads.

    Args:
        loaded: Tensors as `sharded_state_dict` asked for them, the rest as it was saved: under 0 and 1 by a job with
            two chained optimizers (everything but experts, experts), at the top by one with a single optimizer.
        optimizer: Megatron's ChainedOptimizer.

    Raises:
        UserError: The state is not that of a distributed optimizer, and its form would have to change.
    """
    parts = optimizer.chained_optimizers
    was_one = bool({"optimizer", "param_groups"} & loaded.keys()) if len(parts) > 1 else 0 not in loaded
    if was_one == (len(parts) == 1):
        return loaded
    if "optimizer" not in (loaded if was_one else loaded[0]):
        raise UserError(
            "the checkpoint's optimizer state was saved with actor.use_distributed_optimizer=false, and "
            "parallel.expert_model_parallel_size was 1 then or is 1 now, but not both. Load it with the size that it "
            "was saved with."
        )
    if len(parts) == 1:
        both = {**loaded, **{key: value for key, value in loaded[0].items() if key not in loaded}}
        return {key: value for key, value in both.items() if key not in (0, 1)}
    common = {key: value for key, value in loaded.items() if key not in (0, 1)}
    adapted: dict[Any, Any] = {}
    for index, part in enumerate(parts):
        is_expert = any(group.get("is_expert_parallel") for group in part.optimizer.param_groups)
        groups = [{**group, "is_expert_parallel": is_expert} for group in common["optimizer"]["param_groups"]]
        adapted[index] = {**common, **loaded[index], "optimizer": {**common["optimizer"], "param_groups": groups}}
    return adapted


def make_adam_state(optimizer: Any) -> None:
    """Zero moments for parameters that were never stepped."""
    for parameter, adam in _states(optimizer):
        if not adam:
            adam["step"] = torch.tensor(0.0)
            adam["exp_avg"] = torch.zeros_like(parameter)
            adam["exp_avg_sq"] = torch.zeros_like(parameter)


@contextmanager
def _padding_kept(optimizer: Any) -> Iterator[None]:
    """Inside, buckets and buffers count their padding as contents, so that gathered state is where parameters are."""
    parts = [(buffer, buffer.numel) for buffer in optimizer.buffers]
    parts += [(bucket, bucket.grad_data.numel()) for buffer in optimizer.buffers for bucket in buffer.buckets]
    counts = [part.numel_unpadded for part, _ in parts]
    for part, size in parts:
        part.numel_unpadded = size
    try:
        yield
    finally:
        for (part, _), count in zip(parts, counts, strict=True):
            part.numel_unpadded = count


def _states(optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, optimizer.optimizer.state[parameter]
