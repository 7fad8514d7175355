"""Access to the state of Adam in Megatron's optimizers: master weights, moments and number of steps.

There are three kinds: torch's, Apex's or TransformerEngine's over fp32 parameters; TransformerEngine's precision-aware
one, whose parameters are the model's and whose states have other dtypes; and Megatron's hybrid of one on the device and
one on the host. `optimizer_state.py` saves and loads the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"
"""State key of a master weight in TransformerEngine's and the hybrid optimizer."""


def trained_parts(optimizer: Any) -> list[Any]:
    """Returns the optimizers of Megatron's chain that have parameters; with adapters of experts alone, one has none."""
    return [part for part in optimizer.chained_optimizers if not getattr(part, "is_stub_optimizer", False)]


def adam_of(part: Any) -> Adam:
    """Returns the Adam accessor for one of Megatron's chained optimizers."""
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        return HybridAdam(part)
    return PreciseAdam(part) if getattr(part.optimizer, "master_weights", False) else Adam(part)


class Adam:
    """Accessor for torch's, Apex's or TransformerEngine's Adam over fp32 parameters (weights or master weights)."""

    def __init__(self, part: Any) -> None:
        """Stores the optimizer.

        Args:
            part: Optimizer of Megatron's chain; `read` and `write` need a DistributedOptimizer.
        """
        self._part, self._inner = part, part.optimizer

    def tensors(self) -> Iterator[Tensor]:
        """Yields all state tensors, some more than once; some may be views of the model's weights."""
        yield from _state_tensors(self._inner)

    def states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yields the optimizer's parameters in order, with their state."""
        for group in self._inner.param_groups:
            for parameter in group["params"]:
                yield parameter, self._inner.state[parameter]

    def make_state(self) -> None:
        """Initialises the state of parameters that have none yet: zero moments, master weights equal to the weights."""
        _make_state(self._inner)

    def read(self, parameter: Tensor) -> dict[str, Tensor]:
        """Returns this rank's range of a model parameter's state: its master weight, as "param", and its moments.

        Moments in bfloat16 and float32, and float32 master weights, are live; everything else is a float32 copy on the
        CPU.
        """
        own = self._own(parameter)
        return {"param": own, **{name: self._inner.state[own][name] for name in MOMENTS}}

    def write(self, parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copies tensors from `read`, or some of them, into the state; the model's weights are already loaded."""
        found = self.read(parameter)
        for name, tensor in tensors.items():
            found[name].copy_(tensor)

    def set_steps(self, num: int) -> None:
        """Sets the number of steps taken."""
        _set_steps(self._inner, num)

    def reload(self) -> None:
        """Sets the master weights to the model's weights."""
        self._part.reload_model_params()

    def _own(self, parameter: Tensor) -> Tensor:
        """Returns the optimizer's parameter for one of the model's."""
        group, order = self._part.model_param_group_index_map[parameter]
        found: Tensor = self._inner.param_groups[group]["params"][order]
        return found


class PreciseAdam(Adam):
    """Accessor for TransformerEngine's FusedAdam with its own master weights; its parameters are ranges of the model's.

    A master weight is float32, scaled float16, or the 16 bits that a bfloat16 weight lacks; a moment is float32,
    bfloat16, or scaled float16. A float32 weight is its own master: FusedAdam creates another one and never steps it.
    """

    def read(self, parameter: Tensor) -> dict[str, Tensor]:
        """Implements `Adam.read`; a float16 state is rescaled as after a load, so that a resumed run is identical."""
        own = self._own(parameter)
        return {"param": self._master(own), **{name: self._state(own, name) for name in MOMENTS}}

    def write(self, parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Implements `Adam.write`."""
        own = self._own(parameter)
        for name, tensor in tensors.items():
            if name != "param":
                self._set(own, name, tensor)
            elif own.dtype == torch.float32:
                own.copy_(tensor)
            elif self._is_remainder(own):
                self._inner.state[own][MASTER].copy_(remainders(own, tensor.to(own.device, torch.float32)))
            else:
                self._set(own, MASTER, tensor)

    def reload(self) -> None:
        """Implements `Adam.reload`; Megatron's own method does not reload these master weights."""
        with torch.no_grad():
            for own, state in self.states():
                if MASTER in state and self._is_remainder(own):
                    state[MASTER].zero_()
                elif MASTER in state:
                    self._set(own, MASTER, own)

    def _is_remainder(self, own: Tensor) -> bool:
        return _stores_remainders(self._inner, own)

    def _master(self, own: Tensor) -> Tensor:
        if own.dtype == torch.float32:
            return own
        if self._is_remainder(own):
            return master_weights(own, self._inner.state[own][MASTER]).to("cpu")
        return self._state(own, MASTER)

    def _state(self, own: Tensor, name: str) -> Tensor:
        state: Tensor = self._inner.state[own][name]
        if state.dtype != torch.float16:
            return state
        found: Tensor = self._inner.get_unscaled_state(own, name)
        self._set(own, name, found)
        return found.to("cpu")

    def _set(self, own: Tensor, name: str, tensor: Tensor) -> None:
        # set_scaled_state scales its argument in place
        self._inner.set_scaled_state(own, name, tensor.detach().to(own.device, torch.float32, copy=True))


class HybridAdam(Adam):
    """Accessor for Megatron's HybridDeviceOptimizer: torch's AdamW on the host for some parameters, else on the device.

    Both step fp32 copies of the model's weights, which are the master weights, with moments in fp32.
    """

    def tensors(self) -> Iterator[Tensor]:
        """Implements `Adam.tensors`."""
        yield from _state_tensors(self._inner)
        for adam in self._inner.sub_optimizers:
            yield from _state_tensors(adam)

    def make_state(self) -> None:
        """Implements `Adam.make_state`; Megatron's own method takes a step with random gradients."""
        for adam in self._inner.sub_optimizers:
            _make_state(adam)
        self._inner._sync_sub_optimizers_state_to_hdo()

    def read(self, parameter: Tensor) -> dict[str, Tensor]:
        """Implements `Adam.read`."""
        own = self._own(parameter)
        state = self._inner.state[own]
        return {"param": self._inner.param_to_inner_param[own], **{name: state[name] for name in MOMENTS}}

    def set_steps(self, num: int) -> None:
        """Implements `Adam.set_steps`."""
        for adam in self._inner.sub_optimizers:
            _set_steps(adam, num)

    def reload(self) -> None:
        """Implements `Adam.reload`; Megatron's own method does not reload these master weights."""
        with torch.no_grad():
            for own, master in self._inner.param_to_inner_param.items():
                if master is not own:
                    master.copy_(own)


def master_weights(weights: Tensor, low: Tensor) -> Tensor:
    """Returns float32 master weights from bfloat16 weights (their rounded upper halves) and the lower halves.

    Args:
        weights: Model weights, bfloat16.
        low: Lower halves, int16, of the same shape; negative where the weight was rounded up (TransformerEngine,
            multi_tensor/adam.cu, AdamFunctorMasterParamRemainder).
    """
    return (_upper(weights) + low.to(torch.int32)).view(torch.float32)


def remainders(weights: Tensor, masters: Tensor) -> Tensor:
    """Returns the lower halves, int16, with which `master_weights` gives the master weights, or the nearest possible.

    Args:
        weights: Model weights, bfloat16, normally the rounded master weights.
        masters: Master weights, float32, of the same shape.
    """
    upper, wanted = _upper(weights), masters.contiguous().view(torch.int32)
    low = (wanted - upper).clamp(-(2**15), 2**15 - 1)
    # with opposite signs the difference overflows, and the weight itself is the nearest value
    return torch.where((wanted < 0) == (upper < 0), low, 0).to(torch.int16)


def _upper(weights: Tensor) -> Tensor:
    return weights.detach().contiguous().view(torch.int16).to(torch.int32) << 16


def _state_tensors(adam: Any) -> Iterator[Tensor]:
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
                adam.initialize_state(parameter, _stores_remainders(adam, parameter))
                continue
            if counts_by_parameter(adam):
                state["step"] = _step(0, group, parameter)
            state.update({name: torch.zeros_like(parameter) for name in MOMENTS})


def _stores_remainders(adam: Any, parameter: Tensor) -> bool:
    """Returns whether a master weight is stored as the weight's missing lower half."""
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
