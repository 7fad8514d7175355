"""Layout of a Hugging Face checkpoint: every tensor unsharded, the common coordinates of all layouts."""

from __future__ import annotations

from mrl.models.base import ArchSpec, PipelineStage
from mrl.resharding.layout import Layout, Piece, StoredTensor
from mrl.resharding.regions import full_region
from mrl.resharding.shards import hf_tensors, layers_of, param_specs

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Input embedding and output head; a model with tied embeddings stores only the first."""

VALUE_HEAD, VALUE_BIAS = "score.weight", "score.bias"
"""Names of a critic's value head; mrl's critics have no bias."""


def hf_layout(arch: ArchSpec, dtype: str) -> Layout:
    """Returns the layout of the checkpoint of `arch`, in the order of the family's table, layer by layer.

    Args:
        arch: The model.
        dtype: Dtype of every tensor that has none of its own.
    """
    rows = param_specs(arch)
    experts = range(arch.moe.num_experts) if arch.moe else range(0)
    layout: Layout = {}
    for place in PipelineStage:
        for layer in range(arch.num_layers) if place is PipelineStage.LAYER else (None,):
            for spec in rows:
                if spec.place is not place or layer not in layers_of(spec, arch):
                    continue
                for expert in experts if spec.kind.is_expert else (None,):
                    for name, shape in hf_tensors(spec, arch).items():
                        full = name if layer is None else name.format(layer=layer, expert=expert)
                        layout[full] = StoredTensor(
                            shape, spec.dtype or dtype, (Piece(full, full_region(shape), full_region(shape)),)
                        )
    return layout
