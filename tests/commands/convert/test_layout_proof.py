"""The cover check counts what it should, and every damage to a layout is found."""

from dataclasses import replace

import pytest

from mrl.commands.convert.layout_proof import prove
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Piece
from mrl.resharding.megatron import megatron_layouts
from mrl.resharding.native import native_layout
from mrl.resharding.trtllm import TrtllmMapping, trtllm_layout
from tests.resharding.archs import ARCHS, counted, small

ARCH = ARCHS["biases, tied"]
DOWN = "model.layers.1.mlp.down_proj.weight"


def test_a_plain_folder_holds_each_element_once():
    proof = prove(ARCH, [hf_layout(ARCH, "float32")])
    elements = sum(t.numel() for t in counted(ARCH).values())
    assert (proof.hf_elements, proof.stored_elements, proof.padding_elements) == (elements, elements, 0)
    assert proof.repeated_elements == {}


@pytest.mark.parametrize(
    "layouts",
    [
        [*megatron_layouts(ARCH, ParallelLayout(4, tp=2, pp=2), dtype="float32", te=False).values()],
        [native_layout(ARCH, 4, rank, "float32") for rank in range(4)],
        [trtllm_layout(ARCH, TrtllmMapping(4, 2), rank, "float32") for rank in range(8)],
    ],
    ids=["megatron", "native", "trtllm"],
)
def test_what_is_stored_is_the_model_and_padding_and_copies(layouts):
    proof = prove(ARCH, layouts)
    stored = proof.hf_elements + proof.padding_elements + sum(proof.repeated_elements.values())
    assert proof.stored_elements == stored


def test_copies_are_counted_by_their_reason():
    """Four ranks: 101 rows padded to 104, two key/value heads held twice, norms and nothing else held four times."""
    proof = prove(ARCH, [native_layout(ARCH, 4, rank, "float32") for rank in range(4)])
    head = ARCH.head_dim * (ARCH.hidden_size + 1)  # weights and bias
    norms = ARCH.num_layers * 2 + 1
    assert proof.padding_elements == 3 * ARCH.hidden_size
    assert proof.repeated_elements == {
        "key/value heads": ARCH.num_layers * 2 * 2 * head,
        "replicated": norms * 3 * ARCH.hidden_size,
    }


def test_fused_queries_may_not_be_copied_though_keys_beside_them_may():
    arch = small("phi3_tiny")
    layout = hf_layout(arch, "float32")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    queries = arch.num_heads * arch.head_dim
    for first, allowed in ((queries, True), (queries - 1, False)):
        src = ((first, first + 2), (0, arch.hidden_size))
        copy = replace(layout[name], shape=(2, 32), pieces=(Piece(name, src, ((0, 2), (0, 32))),))
        if allowed:
            assert prove(arch, [layout, {"copy": copy}]).repeated_elements == {"key/value heads": 64}
        else:
            with pytest.raises(RuntimeError, match="are stored more than once"):
                prove(arch, [layout, {"copy": copy}])


def without_last_row(layout):
    stored = layout[DOWN]
    (piece,) = stored.pieces
    rows, rest = stored.shape[0] - 1, piece.src[1]
    layout[DOWN] = replace(
        stored, shape=(rows, stored.shape[1]), pieces=(Piece(DOWN, ((0, rows), rest), ((0, rows), rest)),)
    )


def swapped_source(layout):
    (piece,) = layout[DOWN].pieces
    other = DOWN.replace("layers.1", "layers.2")
    layout[DOWN] = replace(layout[DOWN], pieces=(replace(piece, hf_name=other),))


DAMAGES = {
    "tensor missing": (lambda layout: layout.pop(DOWN), f"1536 of 1536 elements of '{DOWN}' are not stored"),
    "row missing": (without_last_row, f"48 of 1536 elements of '{DOWN}' are not stored"),
    "another tensor's values": (swapped_source, f"1536 of 1536 elements of '{DOWN}' are not stored"),
    "stored twice": (
        lambda layout: layout.update(copy=layout[DOWN]),
        f"elements of '{DOWN}' are stored more than once",
    ),
    "no origin": (lambda layout: layout.update({DOWN: replace(layout[DOWN], pieces=())}), "elements have no piece"),
    "two origins": (
        lambda layout: layout.update({DOWN: replace(layout[DOWN], pieces=layout[DOWN].pieces * 2)}),
        "cover the same elements",
    ),
    "unknown tensor": (
        lambda layout: layout.update(x=replace(layout[DOWN], pieces=(replace(layout[DOWN].pieces[0], hf_name="x"),))),
        "the target has 'x', which is not a tensor of a qwen2 model",
    ),
}


@pytest.mark.parametrize("damage, message", DAMAGES.values(), ids=DAMAGES)
def test_every_damage_is_found(damage, message):
    layout = hf_layout(ARCH, "float32")
    damage(layout)
    with pytest.raises(RuntimeError) as refusal:
        prove(ARCH, [layout])
    assert message in str(refusal.value)
