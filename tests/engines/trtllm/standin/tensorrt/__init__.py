"""Stands in for TensorRT's Python package: an engine whose weights a strict `Refitter` replaces.

Where TensorRT returns False, so does it; what would be undefined there raises `StandinError` here: a pointer to memory
that is gone, that changed between `set_named_weights` and `refit_cuda_engine`, or that is not where it is said to be,
and a refit while the engine generates.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib

import torch

from tests.engines.trtllm.signature import enum_of, signed

__version__ = "10.13.3"

DataType = enum_of("tensorrt.DataType")
TensorLocation = enum_of("tensorrt.TensorLocation")

CONSTANTS = ("embed_positions", "rotary_inv_freq", "embed_positions_for_gpt_attention")
TORCH = {DataType.FLOAT: torch.float32, DataType.HALF: torch.float16, DataType.BF16: torch.bfloat16}
KINDS = {dtype: kind for kind, dtype in TORCH.items()}


class StandinError(Exception):
    """What would be undefined behaviour."""


class Logger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    @signed("tensorrt.Logger.__init__")
    def __init__(self, min_severity=None):
        self.min_severity = min_severity


class Weights:
    @signed("tensorrt.Weights.__init__")
    def __init__(self, type, ptr, count):
        self.dtype, self.ptr, self.size = type, ptr, count

    @property
    def nbytes(self):
        return self.size * TORCH[self.dtype].itemsize


class ICudaEngine:
    """Weights by name; `refits` counts how often they were replaced."""

    def __init__(self, weights, refittable):
        self.weights, self.refittable = weights, refittable
        self.refits = 0
        self.generating = False


class Refitter:
    @signed("tensorrt.Refitter.__init__")
    def __init__(self, engine, logger):
        self._engine, self.logger = engine, logger
        self._given = {}
        self.refused = []

    @signed("tensorrt.Refitter.get_all_weights")
    def get_all_weights(self):
        return list(self._engine.weights)

    @signed("tensorrt.Refitter.get_missing_weights")
    def get_missing_weights(self):
        names = self._engine.weights
        return [name for name in names if name not in self._given and name.rpartition(".")[2] not in CONSTANTS]

    @signed("tensorrt.Refitter.get_weights_prototype")
    def get_weights_prototype(self, weights_name):
        held = self._engine.weights[weights_name]
        return Weights(KINDS[held.dtype], 0, held.numel())

    @signed("tensorrt.Refitter.set_named_weights")
    def set_named_weights(self, name, weights, location):
        if name not in self._engine.weights:
            self.refused.append(f"{name}: unknown")
            return False
        held = self._engine.weights[name]
        if (TORCH[weights.dtype], weights.size) != (held.dtype, held.numel()):
            self.refused.append(f"{name}: {weights.size} of {weights.dtype}")
            return False
        if location is not TensorLocation.HOST:  # a machine without GPUs has no other memory
            raise StandinError(f"{name}: the pointer is no memory of {location}")
        self._given[name] = (weights, _digest(weights))
        return True

    @signed("tensorrt.Refitter.refit_cuda_engine")
    def refit_cuda_engine(self):
        if self._engine.generating:
            raise StandinError("refit while the engine generates")
        if self.get_missing_weights():
            return False
        live = _live_memory()
        for name, (weights, digest) in self._given.items():
            if not any(start <= weights.ptr and weights.ptr + weights.nbytes <= end for start, end in live):
                raise StandinError(f"{name}: no live buffer has this memory")
            if _digest(weights) != digest:
                raise StandinError(f"{name}: the buffer changed before the refit was over")
            held = self._engine.weights[name]
            bytes_ = torch.frombuffer(bytearray(_read(weights)), dtype=held.dtype)
            self._engine.weights[name] = bytes_.view(held.shape)
        self._given.clear()
        self._engine.refits += 1
        return True


def _live_memory():
    """(start, end) of the memory of each tensor that is alive."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = [each.untyped_storage() for each in tensors if each.device.type == "cpu" and torch._C._has_storage(each)]
    return {(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages}


def _read(weights):
    return ctypes.string_at(weights.ptr, weights.nbytes)


def _digest(weights):
    return hashlib.blake2b(_read(weights)).digest()
