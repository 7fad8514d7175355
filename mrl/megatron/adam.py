"""Adam inside one of Megatron's optimizers: where each kind keeps master weights, moments and the number of steps.

Three kinds: torch's, Apex's or TransformerEngine's over fp32 parameters; TransformerEngine's precision-aware one, whose
parameters are the model's and whose states have types of their own; and Megatron's hybrid of one on the device and one
on the host. Owns how their states are read and written as plain tensors. What a checkpoint makes of these is in
`optimizer_state.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"
"""TransformerEngine's name, and the hybrid's, for a master weight."""


def adam_of(part: Any) -> Adam:
    """The Adam of one of a chain of Megatron's optimizers, by its kind."""
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        return HybridAdam(part)
    return PreciseAdam(part) if getattr(part.optimizer, "master_weights", False) else Adam(part)


class Adam:
    """Torch's, Apex's or TransformerEngine's, whose parameters are fp32: master weights, or the weights themselves."""

    def __init__(self, part: Any) -> None:
        """Args: part: Megatron's optimizer; `read` and `write` need a DistributedOptimizer."""
        self._part, self._inner = part, part.optimizer

    def tensors(self) -> Iterator[Tensor]:
        """All that it holds, some more than once; some may be views of the model's weights."""
        yield from _held(self._inner)

    def states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Its parameters in their order, with their state."""
        for group in self._inner.param_groups:
            for parameter in group["params"]:
                yield parameter, self._inner.state[parameter]

    def make_state(self) -> None:
        """Zero moments, and master weights that are the weights, for parameters that were never stepped."""
        _make_state(self._inner)

    def read(self, parameter: Tensor) -> dict[str, Tensor]:
        """This rank's run of one of the model's parameters: its master weight, as "param", and its moments.

        Moments in bfloat16 and float32 are live, so are master weights in float32; anything else is a copy in float32
        on the CPU.
        """
        own = self._own(parameter)
        return {"param": own, **{name: self._inner.state[own][name] for name in MOMENTS}}

    def write(self, parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Takes up what `read` gave, or some of it; the model has its weights already."""
        found = self.read(parameter)
        for name, tensor in tensors.items():
            found[name].copy_(tensor)

    def set_steps(self, num: int) -> None:
        """How many steps its moments have seen."""
        _set_steps(self._inner, num)

    def reload(self) -> None:
        """Master weights are the model's weights again."""
        self._part.reload_model_params()

    def _own(self, parameter: Tensor) -> Tensor:
        """Its parameter for one of the model's."""
        group, order = self._part.model_param_group_index_map[parameter]
        found: Tensor = self._inner.param_groups[group]["params"][order]
        return found


class PreciseAdam(Adam):
    """TransformerEngine's FusedAdam with master weights of its own: its parameters are the model's, cut into runs.

    A master weight is float32, float16 under a scale, or the 16 bits that a bfloat16 weight lacks; a moment is float32,
    bfloat16, or float16 under a scale. A float32 weight is its own master: FusedAdam makes another and never steps it.
    """

    def read(self, parameter: Tensor) -> dict[str, Tensor]:
        """As of `Adam`. A float16 state gets the scale that it has after a load, so that a resume is no different."""
        own = self._own(parameter)
        return {"param": self._master(own), **{name: self._state(own, name) for name in MOMENTS}}

    def write(self, parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """As of `Adam`."""
        own = self._own(parameter)
        for name, tensor in tensors.items():
            if name != "param":
                self._set(own, name, tensor)
            elif own.dtype == torch.float32:
                own.copy_(tensor)
            elif self._cut(own):
                self._inner.state[own][MASTER].copy_(remainders(own, tensor.to(own.device, torch.float32)))
            else:
                self._set(own, MASTER, tensor)

    def reload(self) -> None:
        """As of `Adam`; Megatron's own way leaves these masters as they were."""
        with torch.no_grad():
            for own, state in self.states():
                if MASTER in state and self._cut(own):
                    state[MASTER].zero_()
                elif MASTER in state:
                    self._set(own, MASTER, own)

    def _cut(self, own: Tensor) -> bool:
        return _in_remainders(self._inner, own)

    def _master(self, own: Tensor) -> Tensor:
        if own.dtype == torch.float32:
            return own
        if self._cut(own):
            return whole(own, self._inner.state[own][MASTER]).to("cpu")
        return self._state(own, MASTER)

    def _state(self, own: Tensor, name: str) -> Tensor:
        state: Tensor = self._inner.state[own][name]
        if state.dtype != torch.float16:
            return state
        found: Tensor = self._inner.get_unscaled_state(own, name)
        self._set(own, name, found)
        return found.to("cpu")

    def _set(self, own: Tensor, name: str, tensor: Tensor) -> None:
        # scaled in place: a copy of it
        self._inner.set_scaled_state(own, name, tensor.detach().to(own.device, torch.float32, copy=True))


class HybridAdam(Adam):
    """Megatron's HybridDeviceOptimizer: torch's AdamW on the host for some parameters, one on the device for the rest.

    Both step fp32 copies of the model's weights, which are the master weights, with moments in fp32.
    """

    def tensors(self) -> Iterator[Tensor]:
        """As of `Adam`."""
        yield from _held(self._inner)
        for adam in self._inner.sub_optimizers:
            yield from _held(adam)

    def make_state(self) -> None:
        """As of `Adam`; Megatron's own way is a step over random gradients."""
        for adam in self._inner.sub_optimizers:
            _make_state(adam)
        self._inner._sync_sub_optimizers_state_to_hdo()

    def read(self, parameter: Tensor) -> dict[str, Tensor]:
        """As of `Adam`."""
        own = self._own(parameter)
        state = self._inner.state[own]
        return {"param": self._inner.param_to_inner_param[own], **{name: state[name] for name in MOMENTS}}

    def set_steps(self, num: int) -> None:
        """As of `Adam`."""
        for adam in self._inner.sub_optimizers:
            _set_steps(adam, num)

    def reload(self) -> None:
        """As of `Adam`; Megatron's own way leaves these masters as they were."""
        with torch.no_grad():
            for own, master in self._inner.param_to_inner_param.items():
                if master is not own:
                    master.copy_(own)


def whole(weights: Tensor, low: Tensor) -> Tensor:
    """Float32 master weights of bfloat16 weights, which are their upper half rounded, and the lower halves.

    Args:
        weights: bfloat16.
        low: int16, of the same shape: what the weights' 32 bits lack, below zero where they were rounded up
            (TransformerEngine, multi_tensor/adam.cu, AdamFunctorMasterParamRemainder).
    """
    return (_upper(weights) + low.to(torch.int32)).view(torch.float32)


def remainders(weights: Tensor, masters: Tensor) -> Tensor:
    """The lower halves with which `whole` gives the master weights, or what is nearest to them beside these weights.

    Args:
        weights: bfloat16, normally the master weights rounded.
        masters: float32, of the same shape.
    """
    upper, wanted = _upper(weights), masters.contiguous().view(torch.int32)
    low = (wanted - upper).clamp(-(2**15), 2**15 - 1)
    # with another sign the difference overflows, and there is nothing nearer than the weight: below zero lie NaNs
    return torch.where((wanted < 0) == (upper < 0), low, 0).to(torch.int16)


def _upper(weights: Tensor) -> Tensor:
    return weights.detach().contiguous().view(torch.int16).to(torch.int32) << 16


def _held(adam: Any) -> Iterator[Tensor]:
    for group in adam.param_groups:
        yield from group["params"]
    for state in adam.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))


def _make_state(adam: Any) -> None:
    for group in adam.param_groups:
        for parameter in group["params"]:
            state = adam.state[parameter]
            if state:
                continue
            if hasattr(adam, "initialize_state"):  # TransformerEngine's
                adam.initialize_state(parameter, _in_remainders(adam, parameter))
                continue
            if counts_by_parameter(adam):
                state["step"] = _step(0, group, parameter)
            state.update({name: torch.zeros_like(parameter) for name in MOMENTS})


def _in_remainders(adam: Any, parameter: Tensor) -> bool:
    """Whether a master weight is kept as what the weight lacks."""
    return bool(getattr(adam, "store_param_remainders", False)) and parameter.dtype == torch.bfloat16


def _set_steps(adam: Any, num: int) -> None:
    if counts_by_parameter(adam):
        for group in adam.param_groups:
            for parameter in group["params"]:
                if parameter in adam.state:
                    adam.state[parameter]["step"] = _step(num, group, parameter)
    else:
        for group in adam.param_groups:
            group["step"] = num


def _step(num: int, group: Mapping[str, Any], parameter: Tensor) -> Tensor:
    """Returns the number of steps as torch's Adam keeps it: its fused kernel reads it on the parameter's device."""
    return torch.tensor(float(num), device=parameter.device if group.get("fused") else "cpu")


def counts_by_parameter(adam: Any) -> bool:
    """Returns whether the step is state of each parameter, as torch's Adam has it.

    TransformerEngine's and Apex's have it in the groups, and take whatever is in the state for a moment.
    """
    return isinstance(adam, (torch.optim.Adam, torch.optim.AdamW))
