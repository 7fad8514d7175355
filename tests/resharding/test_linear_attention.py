"""Rows of linear attention and of output gates in Megatron and the native engine, against rows cut by hand."""

import pytest
import torch

from mrl.parallel_layout import ParallelLayout
from mrl.resharding.megatron import megatron_layout
from mrl.resharding.native import native_layout
from tests.resharding.archs import ARCHS, counted, filled

TEXT, NEXT = ARCHS["linear attention"], ARCHS["linear attention, experts"]
PREFIX = "model.layers.0.linear_attn."
MEGATRON = "chunk0.decoder.layers.{}.self_attention."


def parts_of(arch, hf):
    """Queries, keys, values, gates, rates and steps: [key heads, rows of one, hidden]."""
    linear = arch.linear_attention
    heads, values = linear.num_key_heads, linear.num_value_heads // linear.num_key_heads * linear.value_head_dim
    if arch.family == "qwen3_next":
        sizes = [linear.key_head_dim, linear.key_head_dim, values, values]
        qkvz = hf[f"{PREFIX}in_proj_qkvz.weight"].view(heads, -1, arch.hidden_size).split(sizes, 1)
        return [*qkvz, *hf[f"{PREFIX}in_proj_ba.weight"].view(heads, -1, arch.hidden_size).chunk(2, 1)]
    qkv = hf[f"{PREFIX}in_proj_qkv.weight"].split([linear.key_size, linear.key_size, linear.value_size])
    others = [hf[f"{PREFIX}in_proj_{part}.weight"] for part in "zba"]
    return [part.view(heads, -1, arch.hidden_size) for part in (*qkv, *others)]


def of_linear_layer(arch, hf, tp, rank):
    """Tensors of layer 0 on one rank, by the end of their Hugging Face names."""
    linear, heads = arch.linear_attention, arch.linear_attention.num_key_heads
    conv = hf[f"{PREFIX}conv1d.weight"].split([linear.key_size, linear.key_size, linear.value_size])
    by_head = torch.cat([part.view(heads, -1, 1, linear.conv_kernel) for part in conv], 1)
    return {
        "in_proj": torch.cat(parts_of(arch, hf), 1).chunk(tp)[rank].flatten(0, 1),
        "conv1d": by_head.chunk(tp)[rank].flatten(0, 1),
        "dt_bias": hf[f"{PREFIX}dt_bias"].chunk(tp)[rank],
        "A_log": hf[f"{PREFIX}A_log"].chunk(tp)[rank],
        "norm": hf[f"{PREFIX}norm.weight"],
        "out_proj": hf[f"{PREFIX}out_proj.weight"].chunk(tp, 1)[rank],
    }


NATIVE = {
    "in_proj": "linear_in",
    "conv1d": "linear_conv",
    "dt_bias": "linear_dt_bias",
    "A_log": "linear_a_log",
    "norm": "linear_norm",
    "out_proj": "linear_out",
}


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("arch", [TEXT, NEXT], ids=lambda arch: arch.family)
def test_a_rank_has_the_rows_of_its_key_heads_head_by_head(arch, tp):
    hf = counted(arch)
    for rank in range(tp):
        megatron = filled(megatron_layout(arch, ParallelLayout(tp, tp=tp), rank, dtype="float32", te=False), hf)
        native = filled(native_layout(arch, tp, rank, "float32"), hf)
        for name, expected in of_linear_layer(arch, hf, tp, rank).items():
            suffix = "" if name in ("dt_bias", "A_log") else ".weight"
            assert torch.equal(megatron[f"{MEGATRON.format(0)}{name}{suffix}"], expected), name
            assert torch.equal(native[f"layers.0.{NATIVE[name]}"], expected), name


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gates_follow_the_queries_of_their_group_in_megatron_and_everything_in_the_engine(tp):
    hf, dim = counted(TEXT), TEXT.head_dim
    query, key, value = (hf[f"model.layers.3.self_attn.{name}_proj.weight"] for name in "qkv")
    queries, gates = query.view(TEXT.num_heads, 2, dim, -1).unbind(1)
    heads = TEXT.num_heads // TEXT.num_kv_heads
    groups = [
        torch.cat([*queries[first : first + heads], *gates[first : first + heads], key[own], value[own]])
        for group in range(TEXT.num_kv_heads)
        for first, own in [(group * heads, slice(group * dim, (group + 1) * dim))]
    ]
    for rank in range(tp):
        megatron = filled(megatron_layout(TEXT, ParallelLayout(tp, tp=tp), rank, dtype="float32", te=False), hf)
        assert torch.equal(megatron[f"{MEGATRON.format(3)}linear_qkv.weight"], torch.cat(groups).chunk(tp)[rank])
        kv = max(1, TEXT.num_kv_heads // tp)
        first = rank * TEXT.num_kv_heads // tp
        own = slice(first * dim, (first + kv) * dim)
        expected = [queries.chunk(tp)[rank].flatten(0, 1), key[own], value[own], gates.chunk(tp)[rank].flatten(0, 1)]
        native = filled(native_layout(TEXT, tp, rank, "float32"), hf)
        assert torch.equal(native["layers.3.qkv"], torch.cat(expected))
