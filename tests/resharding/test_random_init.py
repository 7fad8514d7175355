"""Random weights are a function of the seed, not of the layout."""

import math

import pytest
import torch

from mrl.parallel_layout import ParallelLayout
from mrl.resharding.checksum import MODULUS, bit_sum
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.megatron import megatron_layout
from mrl.resharding.native import native_layout
from mrl.resharding.random_init import INITIALIZER_RANGE, random_init
from tests.resharding.archs import ARCHS, filled, small
from tests.resharding.test_experts import MOE


def model(arch, seed=0, dtype="float32", **options):
    tensors = allocate(hf_layout(arch, dtype))
    random_init(arch, hf_layout(arch, dtype), tensors, seed, **options)
    return tensors


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_every_layout_gets_the_same_model(arch):
    hf = model(arch)
    layouts = [megatron_layout(arch, ParallelLayout(8, 4, 2), rank, dtype="float32", te=True) for rank in range(8)]
    layouts += [megatron_layout(arch, ParallelLayout(2, 1, 2, 2), rank, dtype="float32", te=False) for rank in range(2)]
    layouts += [native_layout(arch, 8, rank, "float32") for rank in range(8)]
    for layout in layouts:
        tensors = allocate(layout)
        for tensor in tensors.values():
            tensor.fill_(torch.nan)
        random_init(arch, layout, tensors, seed=0)
        for name, expected in filled(layout, hf).items():
            assert torch.equal(tensors[name], expected), name


@pytest.mark.parametrize("name", MOE)
def test_every_layout_gets_the_same_experts(name):
    arch = MOE[name]
    hf = model(arch)
    assert len({tensor.sum().item() for key, tensor in hf.items() if "experts." in key}) == 2 * 4 * 3  # each its own
    grids = [
        ParallelLayout(8, ep=4),
        ParallelLayout(8, 2, ep=2, etp=1),
        ParallelLayout(8, 2, ep=2),
        ParallelLayout(8, pp=2, ep=2, etp=2),
    ]
    layouts = [megatron_layout(arch, grid, rank, dtype="float32", te=True) for grid in grids for rank in range(8)]
    sums = {sum(map(bit_sum, hf.values())) % MODULUS}
    for tp, ep in ((2, 2), (4, 2)):
        ranks = [native_layout(arch, tp, rank, "float32", ep_size=ep) for rank in range(tp)]
        layouts += ranks
        experts = [key for key in ranks[0] if "experts_" in key]
        drawn = [drawn_experts(arch, layout, experts) for layout in ranks]
        sums.add((sum(drawn) + sum(bit_sum(tensor) for key, tensor in hf.items() if "experts." not in key)) % MODULUS)
    assert len(sums) == 1  # the checksum sees no layout
    for layout in layouts:
        tensors = allocate(layout)
        random_init(arch, layout, tensors, seed=0)
        for key, expected in filled(layout, hf).items():
            assert torch.equal(tensors[key], expected), key


def drawn_experts(arch, layout, names):
    tensors = allocate(layout)
    random_init(arch, layout, tensors, seed=0)
    return sum(bit_sum(tensors[name]) for name in names)


def test_a_tensor_of_several_blocks_is_the_same_by_rows_and_by_columns():
    """[2048, 512] embeddings are 4 blocks; down_proj [512, 1536] is cut by columns, 3 blocks."""
    arch = small("llama_tiny", hidden_size=512, intermediate_size=1536, vocab_size=2048, num_hidden_layers=1)
    hf = model(arch)
    for rank in range(4):
        layout = native_layout(arch, 4, rank, "float32")
        tensors = allocate(layout)
        random_init(arch, layout, tensors, seed=0)
        assert all(torch.equal(tensors[name], expected) for name, expected in filled(layout, hf).items())


def test_no_rows_of_a_large_tensor_repeat():
    embed = model(small("llama_tiny", hidden_size=512, vocab_size=2048, num_hidden_layers=1))[
        "model.embed_tokens.weight"
    ]
    assert embed.unique(dim=0).shape == embed.shape


def test_the_seed_and_the_name_decide():
    arch = ARCHS["biases, tied"]
    first, again, other = model(arch, 0), model(arch, 0), model(arch, 1)
    name = "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first["model.layers.0.mlp.up_proj.weight"])
    assert not torch.equal(first[name], first["model.layers.1.mlp.gate_proj.weight"])


def test_values_follow_hugging_faces_defaults():
    arch = small("qwen2_tiny", hidden_size=256, intermediate_size=1024, num_hidden_layers=1)
    hf = model(arch)
    assert hf["model.norm.weight"].eq(1).all()
    assert hf["model.layers.0.self_attn.q_proj.bias"].eq(0).all()
    gate = hf["model.layers.0.mlp.gate_proj.weight"]
    four_sigma = 4 * INITIALIZER_RANGE / math.sqrt(gate.numel())
    assert abs(float(gate.mean())) < four_sigma
    assert abs(float(gate.std()) - INITIALIZER_RANGE) < four_sigma  # the std's own error is smaller still


def test_the_initializer_range_scales_matrices_alone():
    arch = ARCHS["biases, tied"]
    narrow, wide = model(arch), model(arch, std=8 * INITIALIZER_RANGE)
    for name, values in narrow.items():
        assert torch.equal(wide[name], values * 8 if values.dim() == 2 else values)  # a power of two: exact


def test_bfloat16_is_the_cast_of_float32():
    arch = ARCHS["biases, tied"]
    exact, short = model(arch), model(arch, dtype="bfloat16")
    assert all(torch.equal(exact[name].bfloat16(), short[name]) for name in exact)
