"""Random initial weights that do not depend on the parallel layout.

Each Hugging Face tensor consists of blocks of rows. A block's values depend only on (seed, tensor name, block index),
so every rank generates the elements that it stores, without communication. The distribution is that of Hugging Face:
matrices and convolutions normal with `initializer_range`, norms one (zero if they are zero-centered), biases zero. Of
linear attention, the decay rates are uniform and the biases of the time steps one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mrl.config.config import LoraConfig
from mrl.models.base import ArchSpec, LayerKind
from mrl.models.presets import INITIALIZER_RANGE
from mrl.resharding.dtypes import check_tensors
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Layout, Piece
from mrl.resharding.lora import adapted_modules, first_expert, peft_name
from mrl.resharding.regions import full_region, intersect, slices, translate
from mrl.resharding.shards import experts_of, hf_tensors, layers_of, param_specs

Draw = Callable[[Tensor, torch.Generator], Tensor]
"""Function that fills an fp32 tensor with random values and returns it."""

_DECAY_LOG, _DECAY_RATES = ".A_log", (0.01, 16.0)
"""Vectors of logarithms of decay rates, and the range of the rates."""

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
            draw = _log_uniform(*_DECAY_RATES) if name.endswith(_DECAY_LOG) else _normal(std)
            _generate_matrix(name, shapes[name], wanted, seed, draw)


def init_adapters(arch: ArchSpec, lora: LoraConfig, layout: Layout, tensors: Mapping[str, Tensor], seed: int) -> None:
    """Fills one rank's low-rank adapters with initial values: lora_A random, lora_B zero.

    Args:
        arch: The model.
        lora: Config section with the rank and the kind of initial values.
        layout: Layout of this rank's adapters, in the coordinates of PEFT's files.
        tensors: Name -> tensor to fill in place; values are drawn in fp32 and cast.
        seed: Random seed; equal seeds give equal adapters under every layout.
    """
    check_tensors(layout, tensors, dtypes=False)
    lora_a = {peft_name(module, "lora_A"): inputs for module, (_, inputs) in adapted_modules(arch, lora).items()}
    filled: set[int] = set()  # addresses: experts may share adapters
    with torch.no_grad():
        for name, stored in layout.items():
            if lora.share_expert_adapters and tensors[name].data_ptr() in filled:
                continue
            filled.add(tensors[name].data_ptr())
            tensors[name].zero_()
            for piece in stored.pieces:
                if piece.hf_name in lora_a:
                    inputs = lora_a[piece.hf_name]
                    draw = _uniform(1 / math.sqrt(inputs)) if lora.init == "kaiming" else _normal(1 / lora.rank)
                    drawn = first_expert(piece.hf_name) if lora.share_expert_adapters else piece.hf_name
                    _generate_matrix(drawn, (lora.rank, inputs), [(piece, tensors[name])], seed, draw)


def _normal(std: float) -> Draw:
    return lambda values, generator: values.normal_(0.0, std, generator=generator)


def _uniform(bound: float) -> Draw:
    return lambda values, generator: values.uniform_(-bound, bound, generator=generator)


def _log_uniform(low: float, high: float) -> Draw:
    return lambda values, generator: values.uniform_(low, high, generator=generator).log_()


def _constant_values(arch: ArchSpec) -> dict[str, float]:
    """Returns the constant value of each vector: 0 for biases and sinks, and for norms what makes their factor 1."""
    found = {}
    for spec in param_specs(arch):
        for name, shape in hf_tensors(spec, arch).items():
            if len(shape) == 1 and not name.endswith(_DECAY_LOG):
                value = 1.0 - arch.norm_offset if name.endswith("norm.weight") else 0.0
                if spec.layers is LayerKind.LINEAR:
                    value = 1.0
                for layer in layers_of(spec, arch):
                    for expert in experts_of(spec, arch):
                        found[name.format(layer=layer, expert=expert)] = value
    return found


def _generate_matrix(
    name: str, shape: tuple[int, ...], wanted: list[tuple[Piece, Tensor]], seed: int, draw: Draw
) -> None:
    """Generates the blocks of one Hugging Face tensor that the pieces intersect, each once, and copies their parts."""
    rows, *inner = shape
    step = max(1, _BLOCK_ELEMENTS // math.prod(inner))
    touched = {block for piece, _ in wanted for block in range(piece.src[0][0] // step, -(-piece.src[0][1] // step))}
    for block in sorted(touched):
        region = ((block * step, min(rows, (block + 1) * step)), *((0, extent) for extent in inner))
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
        values = draw(torch.empty(region[0][1] - region[0][0], *inner), generator)
        for piece, target in wanted:
            both = intersect(piece.src, region)
            if both is not None:
                part = values[slices(translate(both, region, full_region(values.shape)))]
                target[slices(translate(both, piece.src, piece.dst))] = part.to(target)
