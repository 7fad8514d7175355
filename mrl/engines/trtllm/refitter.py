"""The weights of a built engine, replaced in place by `tensorrt.Refitter` from this rank's own memory.

Owns the buffers that a refit fills, by the names of a TensorRT-LLM checkpoint, and the account of names: each weight
that the engine has gets exactly one buffer, and each tensor of the checkpoint goes to one weight of the engine;
anything else is refused when the engine is loaded. Buffers exist from `begin` to `commit` only, so that a refit needs a
second copy of the rank's weights and generation does not.

What a weight of an engine is made of is `resharding/trtllm.py`'s.
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
from mrl.resharding.regions import volume, whole
from mrl.resharding.trtllm import is_shared_head, parts_in_engine
from mrl.resharding.weight_slice import WeightSlice


class EngineWeights:
    """The weights of one rank's engine.

    Args:
        engine: `tensorrt.ICudaEngine`.
        layout: What the rank's checkpoint file holds.
        device: Where buffers are.
        where: The engine in words, for messages.

    Attributes:
        layout: What a refit brings: without the head where the engine shares the tied embedding.

    Raises:
        UserError: The engine cannot be refitted, or its weights are not those of the layout.
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
        """Allocates the buffers, uninitialised."""
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
                raise RuntimeError(f"'{item.name}' is not a tensor of {self._where}, or no update was begun")
            item.write_to(buffer)

    def checksum(self) -> int:
        """Sum over the bit patterns of all buffers; after `commit` what it was before."""
        if self._buffers:
            self._checksum = sum(bit_sum(buffer) for buffer in self._buffers.values()) % MODULUS
        return self._checksum

    def commit(self) -> None:
        """Makes the buffers the engine's weights and lets go of them.

        The engine must not be generating. After an error its weights are undefined.

        Raises:
            RuntimeError: TensorRT refuses a weight, misses one, or the refit fails; the weight is named.
        """
        import tensorrt

        self._synchronize()  # copies run on PyTorch's stream, the refitter on its own
        on_device = self._device.type == "cuda"
        location = tensorrt.TensorLocation.DEVICE if on_device else tensorrt.TensorLocation.HOST
        held = []  # TensorRT reads through these pointers until the refit is over
        for name, buffer in self._fused.items():
            weights = tensorrt.Weights(self._kinds[buffer.dtype], buffer.data_ptr(), buffer.numel())
            held.append(weights)
            if not self._refitter.set_named_weights(name, weights, location):
                given = f"{list(buffer.shape)} {buffer.dtype}"
                raise RuntimeError(f"TensorRT refused the new weights of '{name}' in {self._where}: {given}")
        missing = [str(name) for name in self._refitter.get_missing_weights()]
        if missing:
            raise RuntimeError(
                f"a refit of {self._where} lacks {len(missing)} weights that TensorRT combined with others, first "
                f"'{missing[0]}'"
            )
        if not self._refitter.refit_cuda_engine():
            raise RuntimeError(f"TensorRT could not refit {self._where}; its log says why")
        self._synchronize()
        del held
        self.discard()

    def discard(self) -> None:
        """Lets go of the buffers."""
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
        """Compares dtype and size of every weight with what the engine was built with."""
        for name in self._parts:
            prototype = self._refitter.get_weights_prototype(name)
            kind, count = self._kinds[self._dtype(name)], volume(whole(self._shape(name)))
            if (prototype.dtype, prototype.size) != (kind, count):
                raise UserError(
                    f"'{name}' of {self._where} has {prototype.size} elements of {prototype.dtype}; the model has "
                    f"{count} of {kind} there. The engine was built for another model, dtype or number of ranks."
                )


def _account(names: Sequence[str], layout: Layout, where: str) -> tuple[Layout, dict[str, tuple[str, ...]]]:
    """(what a refit brings, weight of the engine -> the tensors of the checkpoint that it is made of, in its order).

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
                f"{where} {what}: {len(which)}, first '{which[0]}'. Was it built for another model or number of ranks, "
                "or with plugins that change its layers?"
            )
    return {name: stored for name, stored in layout.items() if name in used}, parts
