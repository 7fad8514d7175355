"""The layout of a Hugging Face checkpoint: every tensor whole, the common coordinates of all layouts."""

from __future__ import annotations

from mrl.models.base import ArchSpec, Place
from mrl.weights.layout import Layout
from mrl.weights.shards import hf_shapes, stack, table


def hf_layout(arch: ArchSpec, dtype: str) -> Layout:
    """Every tensor of the checkpoint of `arch`, in the order of the table, layer by layer.

    Args:
        arch: The model.
        dtype: "float32" or "bfloat16".
    """
    rows = table(arch)
    layout: Layout = {}
    for place in Place:
        for layer in range(arch.num_layers) if place is Place.LAYER else (None,):
            for spec in rows:
                if spec.place is place:
                    for name, shape in zip(spec.hf, hf_shapes(spec, arch), strict=True):
                        full = name if layer is None else name.format(layer=layer)
                        layout[full] = stack([full], [shape], [(0, 0, shape[0])], dim=0, dtype=dtype)
    return layout
