"""Weight replacement of a built engine in place by `tensorrt.Refitter`, from buffers in this rank's memory.

The buffers are named like the tensors of a TensorRT-LLM checkpoint. Each weight of the engine is made of exactly one
buffer, and each tensor of the checkpoint goes to one weight; any other mapping is rejected when the engine is loaded.
Buffers exist only from `begin` to `commit`: a weight sync needs a second copy of the rank's weights, generation does
not.

`resharding/trtllm.py` defines which tensors form a weight of an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.errors import UserError
from mrl.resharding.checksum import MODULUS, bit_sum
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.layout import Layout
from mrl.resharding.regions import full_region, volume
from mrl.resharding.trtllm import is_shared_head, parts_in_engine
from mrl.resharding.weight_slice import WeightSlice


class EngineWeights:
    """Weights of one rank's engine.

    Args:
        engine: Loaded `tensorrt.ICudaEngine`.
        layout: Tensors of the rank's checkpoint file.
        device: Device of the buffers.
        where: Name of the engine in messages.

    Attributes:
        layout: Tensors that a weight sync sends; without the output layer where the engine shares the tied embedding.

    Raises:
        UserError: The engine is not refittable, or its weights do not match the layout.
    """

    def __init__(self, engine: Any, layout: Layout, device: torch.device, where: str) -> None:
        import tensorrt

        if not engine.refittable:
            raise UserError(
                f"{where} cannot be refitted. Build it again with tools/build_trtllm_engine.py, which sets use_refit."
            )
        self._where = where
        self._device = device
        self._kinds = {
            torch.float32: tensorrt.DataType.FLOAT,
            torch.float16: tensorrt.DataType.HALF,
            torch.bfloat16: tensorrt.DataType.BF16,
        }
        self._refitter = tensorrt.Refitter(engine=engine, logger=tensorrt.Logger(tensorrt.Logger.ERROR))
        names = [str(name) for name in self._refitter.get_all_weights()]
        self.layout, self._parts = _account(names, layout, where)
        self._check_prototypes()
        self._fused: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._checksum = 0

    def begin(self) -> None:
        """Allocates uninitialised buffers."""
        self._fused = {
            name: torch.empty(self._shape(name), dtype=self._dtype(name), device=self._device) for name in self._parts
        }
        self._buffers = {}
        for name, parts in self._parts.items():
            views = torch.split(self._fused[name], [self.layout[part].shape[0] for part in parts])
            self._buffers |= dict(zip(parts, views, strict=True))

    def write(self, bucket: Sequence[WeightSlice]) -> None:
        """Copies a bucket into the buffers.

        Raises:
            RuntimeError: `begin` was not called, or a slice does not fit its buffer.
        """
        for item in bucket:
            buffer = self._buffers.get(item.name)
            if buffer is None:
                raise RuntimeError(f"'{item.name}' is not a tensor of {self._where}, or begin_update was not called")
            item.write_to(buffer)

    def checksum(self) -> int:
        """Returns the sum over the bit patterns of all buffers; after `commit`, the last value before it."""
        if self._buffers:
            self._checksum = sum(bit_sum(buffer) for buffer in self._buffers.values()) % MODULUS
        return self._checksum

    def commit(self) -> None:
        """Copies the buffers into the engine's weights and frees them.

        The engine must not be generating. After an error its weights are undefined.

        Raises:
            RuntimeError: TensorRT rejects a weight, misses one, or the refit fails; the weight is named.
        """
        import tensorrt

        self._synchronize()  # copies run on PyTorch's stream, the refitter on its own
        on_device = self._device.type == "cuda"
        location = tensorrt.TensorLocation.DEVICE if on_device else tensorrt.TensorLocation.HOST
        held = []  # TensorRT reads through these pointers until the refit is finished
        for name, buffer in self._fused.items():
            weights = tensorrt.Weights(self._kinds[buffer.dtype], buffer.data_ptr(), buffer.numel())
            held.append(weights)
            if not self._refitter.set_named_weights(name, weights, location):
                given = f"{list(buffer.shape)} {buffer.dtype}"
                raise RuntimeError(f"TensorRT refused the new weights of '{name}' in {self._where}: {given}")
        missing = [str(name) for name in self._refitter.get_missing_weights()]
        if missing:
            raise RuntimeError(
                f"the refit of {self._where} lacks {len(missing)} weights that TensorRT combined with others; the "
                f"first is '{missing[0]}'"
            )
        if not self._refitter.refit_cuda_engine():
            raise RuntimeError(f"TensorRT could not refit {self._where}; see its log for the reason")
        self._synchronize()
        del held
        self.discard()

    def discard(self) -> None:
        """Frees the buffers."""
        self._fused, self._buffers = {}, {}

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _shape(self, name: str) -> tuple[int, ...]:
        shapes = [self.layout[part].shape for part in self._parts[name]]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def _dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.layout[self._parts[name][0]].dtype]

    def _check_prototypes(self) -> None:
        """Compares dtype and size of every weight with those the engine was built with."""
        for name in self._parts:
            prototype = self._refitter.get_weights_prototype(name)
            kind, count = self._kinds[self._dtype(name)], volume(full_region(self._shape(name)))
            if (prototype.dtype, prototype.size) != (kind, count):
                raise UserError(
                    f"'{name}' of {self._where} has {prototype.size} elements of {prototype.dtype}; the model has "
                    f"{count} of {kind} there. The engine was built for another model, dtype or number of ranks."
                )


def _account(names: Sequence[str], layout: Layout, where: str) -> tuple[Layout, dict[str, tuple[str, ...]]]:
    """Returns the layout that a weight sync sends, and for each weight of the engine its checkpoint tensors in order.

    Raises:
        UserError: Names are missing on either side.
    """
    parts = {name: found for name in names if (found := parts_in_engine(name))}
    used = {part for fused in parts.values() for part in fused}
    extra = sorted(name for name, fused in parts.items() if not set(fused) <= set(layout))
    missing = sorted(name for name in set(layout) - used if not is_shared_head(name, layout, used))
    for what, which in (("has weights that the model lacks", extra), ("lacks weights of the model", missing)):
        if which:
            raise UserError(
                f"{where} {what}: {len(which)}; the first is '{which[0]}'. Was it built for another model or number of "
                "ranks, or with plugins that change its layers?"
            )
    return {name: stored for name, stored in layout.items() if name in used}, parts
