"""The native engine's layout, written a second time with torch.cat and chunk."""

import pytest
import torch

from mrl.errors import UserError
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.native import native_layout, native_layouts
from tests.resharding.archs import ARCHS, PLAIN, counted, filled, small


def expected(arch, hf, tp, rank):
    def own(name, dim=0):
        return hf[name].chunk(tp, dim=dim)[rank]

    def kv(name):
        heads = hf[name].chunk(arch.num_kv_heads)
        each = max(1, arch.num_kv_heads // tp)
        first = rank * arch.num_kv_heads // tp
        return torch.cat(heads[first : first + each])

    def vocabulary(name):
        rows = -(-arch.vocab_size // tp)
        part = hf[name][rank * rows : (rank + 1) * rows]
        return torch.cat([part, part.new_zeros(rows - len(part), arch.hidden_size)])

    found = {"embed": vocabulary("model.embed_tokens.weight"), "final_norm": hf["model.norm.weight"]}
    if not arch.tie_word_embeddings:
        found["lm_head"] = vocabulary("lm_head.weight")
    for layer in range(arch.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        attention, mlp = theirs + "self_attn.", theirs + "mlp."
        found[ours + "input_norm"] = hf[theirs + "input_layernorm.weight"]
        for name, what in (("qkv", "weight"), *((("qkv_bias", "bias"),) if arch.qkv_bias else ())):
            parts = [own(f"{attention}q_proj.{what}"), kv(f"{attention}k_proj.{what}"), kv(f"{attention}v_proj.{what}")]
            found[ours + name] = torch.cat(parts)
        if arch.qk_norm:
            found[ours + "q_norm"], found[ours + "k_norm"] = (hf[f"{attention}{name}_norm.weight"] for name in "qk")
        found[ours + "o"] = own(attention + "o_proj.weight", 1)
        found[ours + "post_norm"] = hf[theirs + "post_attention_layernorm.weight"]
        if arch.post_norms:
            found[ours + "attention_out_norm"] = hf[theirs + "post_attention_layernorm.weight"]
            found[ours + "post_norm"] = hf[theirs + "pre_feedforward_layernorm.weight"]
            found[ours + "mlp_out_norm"] = hf[theirs + "post_feedforward_layernorm.weight"]
        found[ours + "gate_up"] = torch.cat([own(mlp + "gate_proj.weight"), own(mlp + "up_proj.weight")])
        found[ours + "down"] = own(mlp + "down_proj.weight", 1)
    return found


@pytest.mark.parametrize("arch", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_rank_holds_its_heads_and_its_rows(arch, tp):
    hf = counted(arch)
    for rank in range(tp):
        ours, theirs = filled(native_layout(arch, tp, rank, "float32"), hf), expected(arch, hf, tp, rank)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor), name


def test_a_vocabulary_smaller_than_the_shards_leaves_ranks_with_padding_only():
    arch = small("qwen2_tiny", vocab_size=5)
    embed = native_layout(arch, 8, 7, "float32")["embed"]
    assert (embed.shape, embed.pieces, embed.padding) == ((1, 32), (), (((0, 1), (0, 32)),))


def test_replicas_share_their_layouts():
    layouts = native_layouts(ARCHS["biases, tied"], ParallelLayout(8, rollout_tp=2), "bfloat16")
    assert len({id(layout) for layout in layouts.values()}) == 2
    assert layouts[0] is layouts[2] is layouts[6]


def test_a_size_that_does_not_divide_is_named():
    with pytest.raises(UserError, match=r"rollout\.tensor_model_parallel_size=3 does not divide"):
        native_layout(ARCHS["biases, tied"], 3, 0, "float32")
