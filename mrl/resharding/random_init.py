"""Random initial weights that do not depend on the parallel layout.

Each Hugging Face tensor consists of blocks of rows. A block's values depend only on (seed, tensor name, block index),
so every rank generates the elements that it stores, without communication. The distribution is that of Hugging Face:
matrices normal with `initializer_range`, norms one, biases zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from mrl.models.base import ArchSpec, ShardKind
from mrl.models.presets import INITIALIZER_RANGE
from mrl.resharding.dtypes import check_tensors
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Layout, Piece
from mrl.resharding.regions import full_region, intersect, slices, translate
from mrl.resharding.shards import hf_tensors, param_specs

_BLOCK_ELEMENTS = 1 << 18
"""Approximate elements per block; changing it changes the values."""


def random_init(
    arch: ArchSpec, layout: Layout, tensors: Mapping[str, Tensor], seed: int, std: float = INITIALIZER_RANGE
) -> None:
    """Fills one rank's tensors with the model of `seed`; padding becomes zero.

    Args:
        arch: The model.
        layout: Layout of this rank's tensors.
        tensors: Name -> tensor to fill in place; values are drawn in fp32 and cast.
        seed: Random seed; equal seeds give equal models under every layout.
        std: Standard deviation of the matrices.
    """
    check_tensors(layout, tensors, dtypes=False)
    constants = _constant_values(arch)
    shapes = {name: stored.shape for name, stored in hf_layout(arch, "float32").items()}
    matrices: dict[str, list[tuple[Piece, Tensor]]] = {}
    with torch.no_grad():
        for name, stored in layout.items():
            target = tensors[name]
            for region in stored.padding:
                target[slices(region)] = 0
            for piece in stored.pieces:
                if piece.hf_name in constants:
                    target[slices(piece.dst)] = constants[piece.hf_name]
                else:
                    matrices.setdefault(piece.hf_name, []).append((piece, target))
        for name, wanted in matrices.items():
            _generate_matrix(name, shapes[name], wanted, seed, std)


def _constant_values(arch: ArchSpec) -> dict[str, float]:
    """Returns the constant value of each vector: 1 for norms, 0 for biases."""
    found = {}
    for spec in param_specs(arch):
        for name, shape in hf_tensors(spec, arch).items():
            if len(shape) == 1:
                for layer in range(arch.num_layers):
                    found[name.format(layer=layer)] = 1.0 if spec.kind is ShardKind.REPLICATED else 0.0
    return found


def _generate_matrix(
    name: str, shape: tuple[int, ...], wanted: list[tuple[Piece, Tensor]], seed: int, std: float
) -> None:
    """Generates the blocks of one Hugging Face matrix that the pieces intersect, each once, and copies their parts."""
    rows, width = shape
    step = max(1, _BLOCK_ELEMENTS // width)
    touched = {block for piece, _ in wanted for block in range(piece.src[0][0] // step, -(-piece.src[0][1] // step))}
    for block in sorted(touched):
        region = ((block * step, min(rows, (block + 1) * step)), (0, width))
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
        values = torch.empty(region[0][1] - region[0][0], width).normal_(0.0, std, generator=generator)
        for piece, target in wanted:
            both = intersect(piece.src, region)
            if both is not None:
                part = values[slices(translate(both, region, full_region(values.shape)))]
                target[slices(translate(both, piece.src, piece.dst))] = part.to(target)
