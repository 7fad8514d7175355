"""What the LLM API's ranks read: every element by some rank, none twice by one, and each back where it came from."""

import pytest
import torch

from mrl.resharding.hf import hf_layout
from mrl.resharding.plan import check_coverage
from mrl.resharding.regions import full_region, slices
from mrl.resharding.trtllm_reads import cut_dim, read_layout, reading_module, to_full_region
from tests.resharding.archs import counted, filled, small

CASES = {
    "dense": (small("qwen2_tiny"), 4, 1),
    "fused": (small("phi3_tiny"), 2, 1),
    "experts": (small("qwen3_moe_tiny"), 4, 2),
    "shared expert": (small("qwen2_moe_tiny"), 4, 4),
    "block_sparse_moe": (small("mixtral_tiny"), 2, 2),
}


@pytest.mark.parametrize("arch, tp, ep", CASES.values(), ids=CASES)
def test_ranks_read_every_element_together_and_parts_go_back_where_they_came_from(arch, tp, ep):
    hf, full = counted(arch), hf_layout(arch, "float32")
    seen = {name: torch.full(tensor.shape, torch.nan) for name, tensor in hf.items()}
    for rank in range(tp):
        layout = read_layout(arch, tp, ep, rank, "float32")
        for name, part in filled(layout, hf).items():
            check_coverage(name, layout[name])
            for inside, place in to_full_region(layout[name], full_region(part.shape)):
                seen[name][slices(place)] = part[slices(inside)]
            assert (cut_dim(layout[name], full[name]) is None) == (part.shape == hf[name].shape)
    for name, tensor in hf.items():
        assert torch.equal(seen[name], tensor), name
    assert read_layout(arch, 1, 1, 0, "float32") == full


def test_a_part_of_a_part_is_placed():
    arch = small("phi3_tiny")
    name = next(name for name in hf_layout(arch, "float32") if "qkv_proj" in name)
    part, hf = read_layout(arch, 2, 1, 1, "float32")[name], counted(arch)[name]
    region = ((3, part.shape[0] - 1), (5, 9))  # over all three pieces
    values = filled({name: part}, {name: hf})[name][slices(region)]
    found = to_full_region(part, region)
    assert len(found) == len(part.pieces) == 3
    for inside, place in found:
        assert torch.equal(hf[slices(place)], values[slices(inside)])


@pytest.mark.parametrize(
    "name, path, expert",
    [
        ("model.embed_tokens.weight", "model.embed_tokens", None),
        ("lm_head.weight", "lm_head", None),
        ("model.layers.3.self_attn.k_proj.bias", "model.layers.3.self_attn.qkv_proj", None),
        ("model.layers.3.mlp.shared_expert.up_proj.weight", "model.layers.3.mlp.shared_expert.gate_up_proj", None),
        ("model.layers.3.mlp.experts.17.up_proj.weight", "model.layers.3.mlp.experts", 17),
        ("model.layers.3.block_sparse_moe.experts.1.w2.weight", "model.layers.3.block_sparse_moe.experts", 1),
    ],
)
def test_each_tensor_has_the_module_of_the_weight_mapper(name, path, expert):
    reader = reading_module(name)
    assert (reader.path, reader.expert) == (path, expert)
