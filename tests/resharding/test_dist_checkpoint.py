"""Keys and boxes of the distributed checkpoint, spelled out; tests/checkpoint/formats compares them with Megatron's
own."""

import math

import pytest

from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.dist_checkpoint import (
    KeyFormat,
    extra_state_keys,
    global_tensors,
    key_formats,
    known_keys,
    rank_shards,
)
from mrl.resharding.layout import StoredTensor
from mrl.resharding.plan import check_coverage
from mrl.resharding.regions import intersect
from tests.resharding.archs import ARCHS, ODD_VOCAB

DENSE = ARCHS["biases, tied"]
MIXTURE = arch_from_preset("qwen2_moe_tiny", {"num_hidden_layers": 4}, ODD_VOCAB)


def boxes(arch, grid, key):
    """Rank -> (offsets, sizes) of what it writes of a key."""
    found = {}
    for rank in range(grid.world_size):
        shards = [shard for shard in rank_shards(arch, grid, rank, dtype="float32") if shard.key == key]
        if shards:
            found[rank] = [(shard.offsets, shard.stored.view) for shard in shards]
    return found


def test_gate_halves_of_all_ranks_come_before_up_halves():
    key = "decoder.layers.mlp.linear_fc1.weight"
    half, hidden = DENSE.intermediate_size // 2, DENSE.hidden_size
    found = boxes(DENSE, ParallelLayout(2, tp=2), key)
    assert found[1][:2] == [
        ((0, half, 0), (1, half, hidden)),
        ((0, 3 * half, 0), (1, half, hidden)),
    ]
    (first, second, *_) = [s for s in rank_shards(DENSE, ParallelLayout(2, tp=2), 1, dtype="float32") if s.key == key]
    assert first.stored.pieces[0].hf_name.endswith("gate_proj.weight")
    assert second.stored.pieces[0].hf_name.endswith("up_proj.weight")
    assert first.global_shape == (DENSE.num_layers, 4 * half, hidden)


def test_an_expert_is_written_by_the_first_of_its_copies():
    key = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    found = boxes(MIXTURE, ParallelLayout(8, tp=2, ep=2, etp=1, pp=2), key)
    experts = MIXTURE.moe.num_experts
    assert sorted(found) == [0, 1, 4, 5], "one of two expert-data-parallel ranks in each stage"
    assert {offsets[1] for offsets, _ in found[1]} == set(range(experts // 2, experts))


def test_the_vocabulary_is_padded_to_the_ranks():
    found = boxes(DENSE, ParallelLayout(4, tp=4), "embedding.word_embeddings.weight")
    rows = -(-ODD_VOCAB // 4)
    assert [found[rank][0][0] for rank in range(4)] == [(rank * rows, 0) for rank in range(4)]


def test_the_last_stages_copy_of_a_tied_embedding_is_not_written():
    assert not boxes(DENSE, ParallelLayout(2, pp=2), "output_layer.weight")
    assert "output_layer.weight" not in known_keys(DENSE)


@pytest.mark.parametrize("arch", [DENSE, MIXTURE])
@pytest.mark.parametrize(
    "grid", [ParallelLayout(4, tp=2, pp=2), ParallelLayout(2, pp=2, vpp=2), ParallelLayout(8, tp=2, pp=2)]
)
def test_boxes_are_apart_and_whole(arch, grid):
    held: dict = {}
    for rank in range(grid.world_size):
        for shard in rank_shards(arch, grid, rank, dtype="float32"):
            check_coverage(shard.name, shard.stored)
            region = tuple((o, o + s) for o, s in zip(shard.offsets, shard.stored.view, strict=True))
            assert all(intersect(region, other) is None for other in held.setdefault(shard.key, [])), shard.name
            held[shard.key].append(region)
    assert held.keys() == known_keys(arch)


SPELLED = {
    KeyFormat.STACKED: "decoder.layers.mlp.experts.experts.linear_fc1.weight",
    KeyFormat.PER_LAYER: "decoder.layers.0.mlp.experts.experts.linear_fc1.weight",
    KeyFormat.SINGLE: "decoder.layers.0.mlp.experts.experts.0.linear_fc1.weight_w",
}


@pytest.mark.parametrize("spelling", SPELLED)
def test_each_spelling_is_found_by_its_keys(spelling):
    layers, experts, moe = MIXTURE.num_layers, MIXTURE.moe.num_experts, MIXTURE.moe
    layout = global_tensors(MIXTURE, {SPELLED[spelling]})
    stored = layout[SPELLED[spelling]]
    assert stored.shape[-1] == MIXTURE.hidden_size
    assert stored.shape[:-2] == {3: (layers, experts), 2: (experts,), 1: ()}[3 - list(KeyFormat).index(spelling)]
    assert stored.shape[-2] == moe.intermediate_size * (1 if spelling is KeyFormat.SINGLE else 2)
    assert spelling in key_formats(MIXTURE, {SPELLED[spelling]})
    for key, stack in layout.items():
        lead = len(stack.shape) - len(stack.parts[0].piece.dst)
        for place in {part.lead for part in stack.parts}:
            pieces = tuple(part.piece for part in stack.parts if part.lead == place)
            check_coverage(key, StoredTensor(stack.shape[lead:], "float32", pieces))
        assert len({part.lead for part in stack.parts}) == math.prod(stack.shape[:lead])
        for part in stack.parts:
            assert part.to_hf(part.to_global(part.piece.src)) == part.piece.src


def test_a_norm_is_found_under_either_specs_name():
    for name in ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"):
        assert f"decoder.layers.{name}" in global_tensors(MIXTURE, {f"decoder.layers.{name}"})
        assert f"decoder.layers.{name}" in known_keys(MIXTURE)


def test_every_module_has_an_extra_state():
    """TransformerEngine's norms and core attention ask for one too."""
    found = set(extra_state_keys(MIXTURE))
    assert {
        "decoder.final_layernorm._extra_state/shard_0_1",
        "decoder.layers.self_attention.core_attention._extra_state/shard_3_4",
        "decoder.layers.pre_mlp_layernorm._extra_state/shard_0_4",
        f"decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_1.3_4.{MIXTURE.moe.num_experts}",
    } <= found
