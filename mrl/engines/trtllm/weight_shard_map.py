"""The part of each Hugging Face tensor that the modules of this rank read, as reported by the modules themselves.

The expected shards of `resharding/trtllm_reads.py` are used where the module that reads the tensor reports the same
rank, shard count, dimension and experts; other tensors are sent complete. After each weight sync a check verifies that
no element that was not sent (NaN) reached the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mrl.engines.base import EngineSpec
from mrl.engines.trtllm.weight_staging import Assembler
from mrl.errors import UserError
from mrl.resharding.copy_op import num_bytes
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.fp8 import DTYPE as FP8
from mrl.resharding.fp8 import Grids, block_grids, fp8_layout, scale_tables
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Layout, StoredTensor
from mrl.resharding.trtllm import TrtllmMapping
from mrl.resharding.trtllm_reads import cut_dim, read_layout, reading_module

FILLED = ("weight", "bias", "w3_w1_weight", "w2_weight")
"""Parameters that a weight sync fills in modules that read tensors (`UnquantizedLinearMethod`, `FusedMoEMethodBase`).
"""

FP8_NAN = 0x7F
"""Bits of NaN in float8_e4m3fn, without the sign."""

MODES = ("column", "row")
"""`TensorParallelMode` of modules whose tensors are split along dimension 0 and 1."""


class WeightShardMap:
    """Tensor parts that one rank reads.

    Attributes:
        layout: Part of each tensor by name; the complete tensor where its module does not report a part.
        notes: Message about modules that do not report a part.
    """

    def __init__(self, model: Any, spec: EngineSpec, rank: int) -> None:
        """Compares the expected parts with the model's modules.

        Args:
            model: TensorRT-LLM's model.
            spec: Specification of the replica.
            rank: Position of this rank in the replica.
        """
        config = spec.config
        size, spread = config.tensor_model_parallel_size, config.expert_parallel_size
        self._full = hf_layout(spec.arch, spec.dtype_name)
        self._device = spec.device
        self._model = model
        expected = read_layout(spec.arch, size, spread, rank, spec.dtype_name)
        experts = TrtllmMapping(size, moe_ep_size=spread).experts(rank)
        modules = dict(model.named_modules())
        self._read: dict[str, Any] = {}
        self.layout: Layout = {}
        silent: list[str] = []
        for name, full in self._full.items():
            part, reader = expected.get(name), reading_module(name)
            if part is not None and cut_dim(part, full) is None and reader.expert is None:
                self.layout[name] = full
                continue
            module = modules.get(reader.path)
            if reader.expert is not None:
                agreed = _has_experts(module, reader.expert, wanted=part is not None) and (
                    part is None or _is_cut(module, part, full, experts.etp.size, experts.etp.rank)
                )
            else:
                agreed = part is not None and _is_cut(module, part, full, size, rank, has_mode=True)
            if not agreed:
                self.layout[name] = full
                silent.append(reader.path)
            elif part is not None:
                self.layout[name] = part
                self._read[reader.path] = module
        self._quantise(block_grids(spec.arch, config.quantization))
        self.notes: tuple[str, ...] = ()
        if silent:
            self.notes = (
                f"{len(silent)} tensors are sent complete to each rank of a replica in a weight sync, since "
                f"TensorRT-LLM's modules do not report which part they read; the first is '{silent[0]}'",
            )

    def _quantise(self, grids: Grids) -> None:
        """Converts quantised tensors in the layouts to FP8, and adds their complete scale tables."""
        self._full, self.layout = fp8_layout(self._full, grids), fp8_layout(self.layout, grids)
        tables = scale_tables({name: self._full[name] for name in self.layout}, grids)
        self._full, self.layout = {**self._full, **tables}, {**self.layout, **tables}

    def assembler(self) -> Assembler:
        """Returns the staging area of a new weight sync."""
        return Assembler(self.layout, self._full, self._device)

    def never_synced(self) -> list[torch.Tensor]:
        """Returns the parameters that no weight sync fills."""
        readers = {reading_module(name).path for name in self._full}
        filled = {f"{path}.{leaf}" for path in readers for leaf in FILLED}
        filled |= {f"{path}.backend.{leaf}" for path in readers for leaf in FILLED}
        return [weight for name, weight in self._model.named_parameters() if name not in filled]

    def check_staging(self, weights: int, device_bytes: int) -> None:
        """Checks that the complete model fits next to its weights, for versions that load it in one call.

        Args:
            weights: Size of the engine's weights on this rank, bytes.
            device_bytes: Memory of the device, bytes.

        Raises:
            UserError: It does not fit, so that no weight sync could succeed.
        """
        staged = sum(num_bytes(self._full[name]) for name in self.layout)
        if weights + staged > device_bytes:
            raise UserError(
                f"the installed TensorRT-LLM loads this model in one call only (its load_weights has no "
                f"allow_partial_loading): a weight sync stages {staged / 1e9:.1f} GB of complete tensors next to "
                f"{weights / 1e9:.1f} GB of weights, but the GPU has {device_bytes / 1e9:.1f} GB. Spread experts "
                "(rollout.expert_parallel_size), or use rollout.name=native."
            )

    def check(self) -> None:
        """Checks that every weight of a module that reads parts is finite, in one pass over the weights.

        Raises:
            RuntimeError: A module read elements that this rank did not receive; the message names it.
        """
        named = list(self._weights())
        if not named:
            return
        sums = torch.stack([_nan_probe(weight.detach()) for _, weight in named])
        if bool(sums.isfinite().all()):
            return
        wrong = next(name for (name, _), total in zip(named, sums.tolist(), strict=True) if total - total != 0.0)
        raise RuntimeError(
            f"'{wrong}' contains values that are not finite: either the actor's weights do, or this version of "
            "TensorRT-LLM reads more of a tensor than its rank's part"
        )

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the parameters of the modules that read parts."""
        for path, module in self._read.items():
            for name, weight in module.named_parameters():
                if weight.is_floating_point():
                    yield f"{path}.{name}", weight


def _nan_probe(weight: torch.Tensor) -> torch.Tensor:
    """Returns a scalar that is not finite if an element is not: the sum, or for FP8 a check of the bits for NaN."""
    if weight.dtype != DTYPES[FP8]:
        return weight.sum(dtype=torch.float32)
    largest = (weight.view(torch.uint8) & FP8_NAN).max().float()
    return torch.where(largest == FP8_NAN, torch.nan, largest)


def _has_experts(module: Any, expert: int, *, wanted: bool) -> bool:
    ids = getattr(module, "initial_local_expert_ids", None)
    return ids is not None and (expert in ids) == wanted


def _is_cut(
    module: Any, part: StoredTensor, full: StoredTensor, size: int, rank: int, *, has_mode: bool = False
) -> bool:
    """Returns whether a module splits a tensor for `rank` of `size` ranks (linear modules: in the same dimension)."""
    dim = cut_dim(part, full)
    if dim is None:
        return True
    mode = getattr(module, "tp_mode", None)
    named = getattr(mode, "value", mode) == MODES[dim] if has_mode else True
    return named and getattr(module, "tp_size", None) == size and getattr(module, "tp_rank", None) == rank
