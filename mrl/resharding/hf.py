"""The layout of a Hugging Face checkpoint: every tensor whole, the common coordinates of all layouts."""

from __future__ import annotations

from mrl.models.base import ArchSpec, Place
from mrl.resharding.layout import Layout, Piece, StoredTensor
from mrl.resharding.regions import whole
from mrl.resharding.shards import hf_tensors, table

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""The two that a tied model has as one."""

VALUE_HEAD, VALUE_BIAS = "score.weight", "score.bias"
"""Of a critic; mrl's has no bias."""


def hf_layout(arch: ArchSpec, dtype: str) -> Layout:
    """Every tensor of the checkpoint of `arch`, in the order of the table, layer by layer.

    Args:
        arch: The model.
        dtype: Of every tensor.
    """
    rows = table(arch)
    experts = range(arch.moe.num_experts) if arch.moe else range(0)
    layout: Layout = {}
    for place in Place:
        for layer in range(arch.num_layers) if place is Place.LAYER else (None,):
            for spec in rows:
                if spec.place is not place:
                    continue
                for expert in experts if spec.kind.is_expert else (None,):
                    for name, shape in hf_tensors(spec, arch).items():
                        full = name if layer is None else name.format(layer=layer, expert=expert)
                        layout[full] = StoredTensor(shape, dtype, (Piece(full, whole(shape), whole(shape)),))
    return layout
