"""A checkpoint that has projections in one tensor gives the same layouts as one that has them apart."""

import pytest
import torch

from mrl.parallel_layout import ParallelLayout
from mrl.resharding.megatron import megatron_layout
from mrl.resharding.native import native_layout
from tests.resharding.archs import counted, filled, small

APART = small("llama_tiny", num_key_value_heads=4)
FUSED = small("phi3_tiny", num_key_value_heads=4)


def fuse(apart):
    """phi3's tensors from llama's, as transformers' Phi3Attention and Phi3MLP slice them"""
    fused = {}
    for layer in range(APART.num_layers):
        prefix = f"model.layers.{layer}."
        qkv = [apart.pop(f"{prefix}self_attn.{name}_proj.weight") for name in "qkv"]
        gate_up = [apart.pop(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")]
        fused[prefix + "self_attn.qkv_proj.weight"] = torch.cat(qkv)
        fused[prefix + "mlp.gate_up_proj.weight"] = torch.cat(gate_up)
    return apart | fused


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_ranks_hold_the_same(tp):
    apart = counted(APART)
    fused = fuse(dict(apart))
    for rank in range(tp):
        megatron = [
            megatron_layout(arch, ParallelLayout(tp, tp=tp), rank, dtype="float32", te=False) for arch in (FUSED, APART)
        ]
        native = [native_layout(arch, tp, rank, "float32") for arch in (FUSED, APART)]
        for ours, theirs in (megatron, native):
            found, expected = filled(ours, fused), filled(theirs, apart)
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), name
