"""Small models that differ in what layouts must get right, and a plain way to fill a layout."""

import torch
from torch import Tensor

from mrl.models.base import ArchSpec
from mrl.models.presets import arch_from_preset
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Layout
from mrl.resharding.regions import slices

ODD_VOCAB = 101
"""Prime: every tensor-parallel size pads it."""


def small(preset: str, **overrides: object) -> ArchSpec:
    return arch_from_preset(
        preset,
        {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8, "num_key_value_heads": 2, **overrides},
        ODD_VOCAB,
    )


LINEAR = {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 2, "linear_value_head_dim": 3}
PLAIN = {
    "biases, tied": small("qwen2_tiny"),
    "no biases, untied, one kv head per query head": small("llama_tiny", num_key_value_heads=8),
    "q/k norm, head_dim apart, tied": small("qwen3_tiny", head_dim=6),
    "norms after attention and MLP": small("gemma3_text_tiny"),
    "biases, untied, one kv head": small("qwen2_tiny", num_key_value_heads=1, tie_word_embeddings=False),
}
ARCHS = {
    **PLAIN,
    "linear attention": small("qwen3_5_text_tiny", **LINEAR),
    "linear attention, experts": small("qwen3_next_tiny", **LINEAR, moe_intermediate_size=16),
}


def counted(arch: ArchSpec) -> dict[str, Tensor]:
    """Hugging Face tensors in which every element of the model has its own value: 1, 2, 3, ..."""
    tensors = allocate(hf_layout(arch, "float32"))
    start = 1
    for tensor in tensors.values():
        tensor.copy_(torch.arange(start, start + tensor.numel()).view(tensor.shape))
        start += tensor.numel()
    assert start < 1 << 24  # exact in fp32
    return tensors


def filled(layout: Layout, hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each stored tensor, straight from its pieces; padding is zero; what nothing covers is NaN."""
    tensors = {name: torch.full(stored.shape, torch.nan) for name, stored in layout.items()}
    for name, stored in layout.items():
        for region in stored.padding:
            tensors[name][slices(region)] = 0
        for piece in stored.pieces:
            tensors[name][slices(piece.dst)] = hf[piece.hf_name][slices(piece.src)]
    return tensors
