"""Names under which a Hugging Face checkpoint may store the tensors of a model's table.

Supported forms differ from the table in names only, or store experts together:

- transformers 5 with `save_original_format=False`: all experts of a layer in `experts.gate_up_proj` (experts,
  2 * width, hidden; gate rows before up rows) and `experts.down_proj` (experts, hidden, width), and Mixtral's experts
  under `mlp`.
- The state of a base model (`AutoModel`), without the prefix `model.`.
- The state of a wrapped model: `torch.compile`, FSDP, activation checkpointing, DDP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mrl.errors import UserError
from mrl.models.base import ArchSpec, ShardKind
from mrl.resharding.hf import hf_layout
from mrl.resharding.shards import hf_tensors, layers_of, param_specs

_WRAPPERS = re.compile(r"^module\.|(?:(?<=^)|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_PREFIX = "model."
_FUSED = {ShardKind.EXPERT_GATE_UP: "gate_up_proj", ShardKind.EXPERT_DOWN: "down_proj"}
_MIXTRAL_BLOCK, _MIXTRAL_BLOCK_OF_5 = ".block_sparse_moe.", ".mlp."


@dataclass(frozen=True)
class StoredLocation:
    """Location of a tensor of the table in a checkpoint.

    Attributes:
        stored: Name of the stored tensor.
        shape: Expected shape of the stored tensor.
        index: Index of this tensor in the stored one; empty: all of it.
    """

    stored: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...] = ()

    def part_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of this tensor as a part of a stored tensor of the given shape."""
        rows = [
            len(range(size)[part]) for size, part in zip(shape, self.index, strict=False) if isinstance(part, slice)
        ]
        return (*rows, *shape[len(self.index) :])


def unwrapped(name: str) -> str:
    """Returns a tensor's name without the names of wrapper modules."""
    return _WRAPPERS.sub("", name)


def locate_tensors(arch: ArchSpec, stored: Mapping[str, tuple[int, ...]]) -> dict[str, StoredLocation]:
    """Finds each tensor of the table among stored tensors; stored tensors outside the table keep their names.

    Args:
        arch: The model.
        stored: Name -> shape of each stored tensor.

    Raises:
        UserError: Two stored tensors are the same tensor of the table.
    """
    plain = {name: tensor.shape for name, tensor in hf_layout(arch, "float32").items()}
    fused = _fused_experts(arch)
    found: dict[str, StoredLocation] = {}
    for name, shape in stored.items():
        known = next((form for form in _forms(name) if form in plain or form in fused), name)
        parts = fused.get(known) or {known: StoredLocation(name, plain.get(known, shape))}
        for own, part in parts.items():
            if own in found:
                raise UserError(
                    f"'{found[own].stored}' and '{name}' are both the tensor '{own}'. Remove one of them from the "
                    "checkpoint."
                )
            found[own] = replace(part, stored=name)
    return found


def _forms(name: str) -> list[str]:
    """Returns the table's names that a stored tensor may have, most likely first."""
    bare = unwrapped(name)
    forms = [bare, _PREFIX + bare]
    return forms + [form.replace(_MIXTRAL_BLOCK_OF_5, _MIXTRAL_BLOCK, 1) for form in forms]


def _fused_experts(arch: ArchSpec) -> dict[str, dict[str, StoredLocation]]:
    """Returns the name of each tensor that contains all experts of a layer -> the tensors of the table in it."""
    fused: dict[str, dict[str, StoredLocation]] = {}
    experts = range(arch.moe.num_experts if arch.moe else 0)
    for spec in param_specs(arch):
        if spec.kind not in _FUSED:
            continue
        own = hf_tensors(spec, arch)
        prefix = next(iter(own)).partition("{expert}")[0]
        num_rows = [shape[0] for shape in own.values()]
        shape = (len(experts), sum(num_rows), *next(iter(own.values()))[1:])
        for layer in layers_of(spec, arch):
            parts = fused.setdefault(prefix.format(layer=layer) + _FUSED[spec.kind], {})
            for expert in experts:
                first = 0
                for name, rows in zip(own, num_rows, strict=True):
                    index = (expert, slice(first, first + rows))
                    parts[name.format(layer=layer, expert=expert)] = StoredLocation("", shape, index)
                    first += rows
    return fused
