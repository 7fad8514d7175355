"""Megatron's layout against its documented fusion, written here a second time with torch.cat and chunk.

That names and shapes are those of a real GPTModel, and that it computes the same, is tested in tests/megatron.
"""

import pytest
import torch

from mrl.errors import UserError
from mrl.parallel_layout import Coords, ParallelLayout
from mrl.resharding.megatron import megatron_layout, megatron_layouts, padded_vocab
from tests.resharding.archs import ARCHS, PLAIN, counted, filled, small

GRIDS = [
    ParallelLayout(1),
    ParallelLayout(2, tp=2),
    ParallelLayout(4, tp=4),
    ParallelLayout(8, tp=8),
    ParallelLayout(2, pp=2),
    ParallelLayout(4, pp=4),
    ParallelLayout(4, tp=2, pp=2),
    ParallelLayout(2, pp=2, vpp=2),
    ParallelLayout(8, tp=2, pp=2, vpp=2),
]


def layer_of(arch, hf, layer, tp, rank):
    """name inside a layer -> tensor, by hand."""
    prefix = f"model.layers.{layer}."

    def fused_qkv(what):
        q, k, v = (hf[f"{prefix}self_attn.{name}_proj.{what}"] for name in "qkv")
        groups = zip(*(part.chunk(arch.num_kv_heads) for part in (q, k, v)), strict=True)
        return torch.cat([torch.cat(group) for group in groups]).chunk(tp)[rank]

    def own(name, dim=0):
        return hf[f"{prefix}{name}.weight"].chunk(tp, dim=dim)[rank]

    found = {
        "input_layernorm.weight": hf[prefix + "input_layernorm.weight"],
        "self_attention.linear_qkv.weight": fused_qkv("weight"),
        "self_attention.linear_proj.weight": own("self_attn.o_proj", 1),
        "pre_mlp_layernorm.weight": hf[prefix + "post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": torch.cat([own("mlp.gate_proj"), own("mlp.up_proj")]),
        "mlp.linear_fc2.weight": own("mlp.down_proj", 1),
    }
    if arch.qkv_bias:
        found["self_attention.linear_qkv.bias"] = fused_qkv("bias")
    if arch.qk_norm:
        found["self_attention.q_layernorm.weight"] = hf[prefix + "self_attn.q_norm.weight"]
        found["self_attention.k_layernorm.weight"] = hf[prefix + "self_attn.k_norm.weight"]
    if arch.post_norms:
        found["self_attn_bda.norm.weight"] = hf[prefix + "post_attention_layernorm.weight"]
        found["pre_mlp_layernorm.weight"] = hf[prefix + "pre_feedforward_layernorm.weight"]
        found["mlp_bda.norm.weight"] = hf[prefix + "post_feedforward_layernorm.weight"]
    return found


def expected(arch, hf, grid, coords):
    """chunk and name -> tensor, by hand."""

    def vocabulary(name):
        rows = hf[name]
        padded = torch.cat([rows, rows.new_zeros(padded_vocab(arch, grid.tp) - len(rows), arch.hidden_size)])
        return padded.chunk(grid.tp)[coords.tp]

    found = {}
    stages = [(chunk, stage) for chunk in range(grid.vpp) for stage in range(grid.pp)]
    per_chunk = arch.num_layers // len(stages)
    for position, (chunk, stage) in enumerate(stages):
        if stage != coords.pp:
            continue
        first, last = position == 0, position == len(stages) - 1
        if first:
            found[f"chunk{chunk}.embedding.word_embeddings.weight"] = vocabulary("model.embed_tokens.weight")
        for local in range(per_chunk):
            tensors = layer_of(arch, hf, position * per_chunk + local, grid.tp, coords.tp)
            found |= {f"chunk{chunk}.decoder.layers.{local}.{name}": tensor for name, tensor in tensors.items()}
        if last:
            found[f"chunk{chunk}.decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if last and not (first and arch.tie_word_embeddings):
            head = "model.embed_tokens.weight" if arch.tie_word_embeddings else "lm_head.weight"
            found[f"chunk{chunk}.output_layer.weight"] = vocabulary(head)
    return found


@pytest.mark.parametrize("arch", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_rank_holds_what_megatron_fuses_and_cuts(arch, grid):
    hf = counted(arch)
    for rank in range(grid.world_size):
        ours = filled(megatron_layout(arch, grid, rank, dtype="float32", te=False), hf)
        theirs = expected(arch, hf, grid, grid.coords(rank))
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor), name


def test_with_transformer_engine_only_the_names_of_fused_norms_differ():
    arch = ARCHS["q/k norm, head_dim apart, tied"]
    local = megatron_layout(arch, ParallelLayout(1), 0, dtype="bfloat16", te=False)
    fused = megatron_layout(arch, ParallelLayout(1), 0, dtype="bfloat16", te=True)
    assert list(local.values()) == list(fused.values())
    layer = "chunk0.decoder.layers.0."
    renamed = {old: new for old, new in zip(local, fused, strict=True) if old != new and old.startswith(layer)}
    assert renamed == {
        layer + "input_layernorm.weight": layer + "self_attention.linear_qkv.layer_norm_weight",
        layer + "pre_mlp_layernorm.weight": layer + "mlp.linear_fc1.layer_norm_weight",
    }


def test_data_parallel_copies_share_one_layout():
    grid = ParallelLayout(8, tp=2, pp=2)
    layouts = megatron_layouts(ARCHS["biases, tied"], grid, dtype="float32", te=False)
    assert layouts[grid.rank(Coords(1, 0, 1))] is layouts[grid.rank(Coords(1, 1, 1))]
    assert len({id(layout) for layout in layouts.values()}) == 4
    for rank, layout in layouts.items():
        assert layout == megatron_layout(ARCHS["biases, tied"], grid, rank, dtype="float32", te=False)


@pytest.mark.parametrize(
    "overrides, grid, message",
    [
        ({}, ParallelLayout(3, tp=3), "tensor_model_parallel_size=3 does not divide the model's attention heads (8)"),
        ({"intermediate_size": 50}, ParallelLayout(4, tp=4), "intermediate_size (50)"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4},
            ParallelLayout(2, tp=2),
            "3 key/value heads",
        ),
        (
            {"num_key_value_heads": 1, "hidden_size": 16},
            ParallelLayout(8, tp=8),
            "does not divide the 20 rows of the fused query, key and value",
        ),
        ({}, ParallelLayout(3, pp=3), "pipeline_model_parallel_size=3 does not divide the model's 4 layers"),
        (
            {},
            ParallelLayout(2, pp=2, vpp=3),
            "virtual_pipeline_model_parallel_size=3 does not divide the model's 4 layers",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_named(overrides, grid, message):
    with pytest.raises(UserError) as refusal:
        megatron_layout(small("llama_tiny", **overrides), grid, 0, dtype="float32", te=False)
    assert message in str(refusal.value)
