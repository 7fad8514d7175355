"""Low-rank adapters in vLLM: weight sync writes them into the tensors that its LoRA layers compute with.

vLLM gets one adapter, all zero, at the start, and activates it. Its layers then keep it in stacked tensors, of which
`VllmAdapters` has views: per projection lora_A [r, in], and the rank's rows of lora_B [out, r], multiplied by the
scale, as vLLM stores it. Each request names the adapter. vLLM loads nothing from a path, since the adapter is known.

Sources, vLLM 0.32: `WorkerLoRAManager`, `LoRAModelManager.activate_adapter`, and the attributes `lora_a_stacked` and
`lora_b_stacked` of its LoRA layers ([adapters, 1, rows, columns] of each slice).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.config.config import LoraConfig
from mrl.engines.base import EngineSpec
from mrl.engines.vllm.adapter_rules import RANKS
from mrl.engines.vllm.engine_fields import INSTALL
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.resharding.layout import Layout
from mrl.resharding.lora import WEIGHT, AdaptedMatrix, engine_matrices, peft_layout, projection_pair

NAME, NUMBER, PATH = "policy", 1, "in memory"
"""Name, id and (unused) path of the adapter in vLLM."""


def lora_arguments(spec: EngineSpec, layout: Layout) -> dict[str, Any]:
    """Returns the keyword arguments of vLLM's `LLM` for low-rank adapters; {} without them.

    Args:
        spec: Constructor argument of the engine.
        layout: Weights of this rank.
    """
    if spec.lora is None:
        return {}
    matrices = engine_matrices(spec.arch, layout, spec.lora, spec.dtype_name)
    modules = sorted({matrix.weight.removesuffix(WEIGHT).rpartition(".")[2] for matrix in matrices})
    rank = next(size for size in RANKS if size >= spec.lora.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": modules}


class VllmAdapters:
    """The adapter of this rank's part of the model.

    Attributes:
        layout: Layout of the stored adapters, in the coordinates of PEFT's files.
        tensors: Views of vLLM's tensors, by the names of the layout.
    """

    def __init__(self, runner: Any, arch: ArchSpec, layout: Layout, lora: LoraConfig, dtype: str, version: str) -> None:
        """Registers and activates the adapter.

        Args:
            runner: vLLM's model runner.
            arch: The model.
            layout: Weights of this rank.
            lora: Config section; `rank` is above 0.
            dtype: Dtype of the adapters.
            version: Version of vLLM, for messages.

        Raises:
            UserError: vLLM's tensors differ from what mrl expects.
        """
        self.layout: Layout = {}
        self.tensors: dict[str, Tensor] = {}
        try:
            slot = _activate(runner.lora_manager, arch, lora, dtype)
            modules = runner.lora_manager._adapter_manager.modules
            for matrix in engine_matrices(arch, layout, lora, dtype):
                self._add(matrix, modules[matrix.weight.removesuffix(WEIGHT)], slot, lora.rank)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(
                f"vLLM {version} keeps low-rank adapters in another way than mrl expects ({type(error).__name__}: "
                f"{error}). Set actor.lora.merge=true. {INSTALL}"
            ) from error

    def _add(self, matrix: AdaptedMatrix, layer: Any, slot: int, rank: int) -> None:
        """Adds the views of a matrix: a pair for each of its slices in vLLM."""
        first = 0
        names = list(dict.fromkeys(piece.hf_name.removesuffix(WEIGHT) for piece in matrix.stored.pieces))
        for index, (stack_a, stack_b) in enumerate(zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)):
            rows = stack_b.size(2)
            covered = names if len(layer.lora_a_stacked) == 1 else names[index : index + 1]
            if len(covered) == 1 and covered[0] in matrix.modules:
                pair = projection_pair(matrix, covered[0], first, rows)
                views = (stack_a[slot, 0, :rank], stack_b[slot, 0, :, :rank])
                for which, stored, view in zip(("lora_A", "lora_B"), pair, views, strict=True):
                    name = f"{matrix.weight.removesuffix(WEIGHT)}.{which}.{index}"
                    if tuple(view.shape) != stored.shape:
                        raise ValueError(f"'{name}' has shape {list(view.shape)}, expected {list(stored.shape)}")
                    self.layout[name], self.tensors[name] = stored, view
            elif len(covered) > 1:
                raise ValueError(f"'{matrix.weight}' has one adapter for {', '.join(covered)}")
            first += rows

    def request(self) -> Any:
        """Returns vLLM's `LoRARequest` of the adapter."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(NAME, NUMBER, PATH)


def _activate(manager: Any, arch: ArchSpec, lora: LoraConfig, dtype: str) -> int:
    """Registers an adapter of zeros and activates it; returns its place in the stacked tensors."""
    from vllm.lora.peft_helper import PEFTHelper

    config = {"r": lora.rank, "lora_alpha": lora.rank, "target_modules": _targets(arch, lora)}  # scale 1
    zeros = {
        name: torch.zeros(stored.shape, dtype=manager.lora_config.lora_dtype)
        for name, stored in peft_layout(arch, lora, dtype).items()
    }
    model = manager._lora_model_cls.from_lora_tensors(
        lora_model_id=NUMBER,
        tensors=zeros,
        peft_helper=PEFTHelper.from_dict(config),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
    )
    inner = manager._adapter_manager
    inner.add_adapter(model)
    inner.activate_adapter(NUMBER)
    return int(inner.lora_index_to_id.index(NUMBER))


def _targets(arch: ArchSpec, lora: LoraConfig) -> Sequence[str]:
    return sorted({name.split(".lora_")[0].rpartition(".")[2] for name in peft_layout(arch, lora, "float32")})
