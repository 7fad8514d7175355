"""Names under which a Hugging Face checkpoint may store the tensors of a model's table.

Supported forms differ from the table in names only, or store experts together:

- transformers 5 with `save_original_format=False`: all experts of a layer in `experts.gate_up_proj` (experts,
  2 * width, hidden; gate rows before up rows) and `experts.down_proj` (experts, hidden, width), and Mixtral's experts
  under `mlp`.
- gpt-oss (`Family.fused_experts`): the same, transposed, with alternating columns of gate and up, and the experts'
  biases in `gate_up_proj_bias` and `down_proj_bias`. mrl writes this form too.
- The state of a base model (`AutoModel`), without the prefix `model.`.
- The text model of a model with a vision tower, with the prefix `model.language_model.`.
- The state of a wrapped model: `torch.compile`, FSDP, activation checkpointing, DDP.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrl.errors import UserError
from mrl.models.base import ArchSpec, ShardKind, moe_of
from mrl.models.hf_config import family_of
from mrl.resharding.hf import hf_layout
from mrl.resharding.shards import hf_tensors, layers_of, param_specs

_WRAPPERS = re.compile(r"^module\.|(?:(?<=^)|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_PREFIX, _TEXT_PREFIX = "model.", "model.language_model."
_FUSED = {
    ShardKind.EXPERT_GATE_UP: "gate_up_proj",
    ShardKind.EXPERT_DOWN: "down_proj",
    ShardKind.EXPERT_REPLICATED: "down_proj",
}
_MIXTRAL_BLOCK, _MIXTRAL_BLOCK_OF_5 = ".block_sparse_moe.", ".mlp."


@dataclass(frozen=True)
class StoredLocation:
    """Location of a tensor of the table in a checkpoint.

    Attributes:
        stored: Name of the stored tensor.
        shape: Expected shape of the stored tensor.
        index: Index of this tensor in the stored one; empty: all of it.
        transposed: True if the indexed part is the transpose of this tensor.
    """

    stored: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...] = ()
    transposed: bool = False

    def part_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of this tensor as a part of a stored tensor of the given shape."""
        rows = [
            len(range(size)[part]) for size, part in zip(shape, self.index, strict=False) if isinstance(part, slice)
        ]
        sizes = (*rows, *shape[len(self.index) :])
        return sizes[::-1] if self.transposed else sizes

    def view_in(self, stored: Tensor) -> Tensor:
        """Returns this tensor as a view of the stored one."""
        part = stored[self.index]
        return part.T if self.transposed else part


Fused = Mapping[str, Mapping[str, StoredLocation]]
"""Name of a stored tensor -> the tensors of the table in it."""


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
    fused = fused_experts(arch)
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
    forms = [bare, _PREFIX + bare, bare.replace(_TEXT_PREFIX, _PREFIX, 1)]
    return forms + [form.replace(_MIXTRAL_BLOCK_OF_5, _MIXTRAL_BLOCK, 1) for form in forms]


def fused_experts(arch: ArchSpec) -> dict[str, dict[str, StoredLocation]]:
    """Returns the name of each tensor that contains all experts of a layer -> the tensors of the table in it."""
    fused: dict[str, dict[str, StoredLocation]] = {}
    alternating = family_of(arch).fused_experts
    for spec in param_specs(arch):
        if spec.kind not in _FUSED:
            continue
        own = hf_tensors(spec, arch)
        first_name, sizes = next(iter(own.items()))
        prefix, suffix = first_name.partition("{expert}")[0], "_bias" if first_name.endswith(".bias") else ""
        parts = _alternating_parts(sizes, len(own)) if alternating else _parts_in_order([*own.values()])
        experts = range(moe_of(arch).num_experts)
        for layer in layers_of(spec, arch):
            found = fused.setdefault(f"{prefix.format(layer=layer)}{_FUSED[spec.kind]}{suffix}", {})
            for expert in experts:
                for name, part in zip(own, parts, strict=True):
                    located = replace(part, shape=(len(experts), *part.shape), index=(expert, *part.index))
                    found[name.format(layer=layer, expert=expert)] = located
    return fused


def written_together(arch: ArchSpec) -> Fused:
    """Returns the stored tensors that contain several tensors of the table in the checkpoints that mrl writes."""
    return fused_experts(arch) if family_of(arch).fused_experts else {}


def _parts_in_order(shapes: Sequence[tuple[int, ...]]) -> list[StoredLocation]:
    """Returns the location of each projection in one expert's tensor: its rows, after those of the one before."""
    parts, first = [], 0
    whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    for shape in shapes:
        parts.append(StoredLocation("", whole, (slice(first, first + shape[0]),)))
        first += shape[0]
    return parts


def _alternating_parts(shape: tuple[int, ...], count: int) -> list[StoredLocation]:
    """Returns the location of each of `count` projections of one shape in an expert's tensor: every count-th column."""
    rows, *columns = shape
    lead = (slice(None),) * len(columns)
    return [
        StoredLocation("", (*columns, count * rows), (*lead, slice(number, None, count)), transposed=bool(columns))
        for number in range(count)
    ]


def join(tensors: Iterable[tuple[str, Tensor]], fused: Fused) -> Iterator[tuple[str, Tensor]]:
    """Yields (stored name, stored tensor); the tensors of the table in one stored tensor come one after another."""
    stored_of = {own: stored for stored, parts in fused.items() for own in parts}
    whole, left = torch.empty(0), 0
    for name, tensor in tensors:
        stored = stored_of.get(name)
        if stored is None:
            yield name, tensor
            continue
        located = fused[stored][name]
        if not left:
            whole, left = torch.empty(located.shape, dtype=tensor.dtype), len(fused[stored])
        located.view_in(whole).copy_(tensor)
        left -= 1
        if not left:
            yield stored, whole
