"""Experts in the layouts, written a second time with torch.cat and chunk; and plans between them."""

import itertools

import pytest
import torch

from mrl.errors import UserError
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.layout import Layout
from mrl.resharding.megatron import chunk_layers, megatron_layout
from mrl.resharding.native import native_layout, native_layouts
from mrl.resharding.vllm import vllm_layouts
from tests.resharding.archs import counted, filled, small
from tests.resharding.test_plan import refitted

EXPERTS = 4
MOE = {
    "qwen3_moe": small("qwen3_moe_tiny", head_dim=6, num_hidden_layers=2, moe_intermediate_size=20),
    "qwen2_moe": small(
        "qwen2_moe_tiny", num_hidden_layers=2, moe_intermediate_size=20, shared_expert_intermediate_size=24
    ),
    "mixtral": small("mixtral_tiny", num_hidden_layers=2),
}


def names(arch):
    """prefix of a layer's experts, router, gate, up, down"""
    if arch.family == "mixtral":
        return "model.layers.{layer}.block_sparse_moe.", "w1", "w3", "w2"
    return "model.layers.{layer}.mlp.", "gate_proj", "up_proj", "down_proj"


def of_experts(arch, hf, layer, held, cut, rank):
    """(fc1 = [gate; up] and fc2 of each of the experts `held`), cut in `cut` parts."""
    prefix, gate, up, down = (name.format(layer=layer) for name in names(arch))
    for expert in held:
        first, second, back = (hf[f"{prefix}experts.{expert}.{name}.weight"] for name in (gate, up, down))
        halves = [first.chunk(cut)[rank], second.chunk(cut)[rank]]
        yield torch.cat(halves), back.chunk(cut, dim=1)[rank]


MEGATRON = [
    ParallelLayout(1),
    ParallelLayout(2, ep=2),
    ParallelLayout(4, ep=4),
    ParallelLayout(2, tp=2),
    ParallelLayout(4, tp=2, ep=2, etp=2),
    ParallelLayout(4, tp=2, ep=2, etp=1),
    ParallelLayout(4, tp=2, ep=4, etp=1),
    ParallelLayout(8, tp=2, pp=2, ep=2, etp=1),
    ParallelLayout(4, tp=1, ep=2, etp=2),
]


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("grid", MEGATRON, ids=str)
@pytest.mark.parametrize("te", [False, True])
def test_a_megatron_rank_holds_its_experts(name, grid, te):
    arch = MOE[name]
    hf = counted(arch)
    for rank in range(grid.world_size):
        ours = filled(megatron_layout(arch, grid, rank, dtype="float32", te=te), hf)
        inside_stage = rank % (grid.world_size // grid.pp)
        etp, ep = inside_stage % grid.expert_tp, inside_stage // grid.expert_tp % grid.ep
        each = EXPERTS // grid.ep
        held = range(ep * each, (ep + 1) * each)
        stage = rank // (grid.world_size // grid.pp)
        per_stage = arch.num_layers // grid.pp
        found = {}
        for local in range(per_stage):
            layer = stage * per_stage + local
            mlp = f"chunk0.decoder.layers.{local}.mlp."
            found[mlp + "router.weight"] = hf[names(arch)[0].format(layer=layer) + "gate.weight"]
            for index, (fc1, fc2) in enumerate(of_experts(arch, hf, layer, held, grid.expert_tp, etp)):
                if te:
                    found[f"{mlp}experts.linear_fc1.weight{index}"] = fc1
                    found[f"{mlp}experts.linear_fc2.weight{index}"] = fc2
                else:
                    found[f"{mlp}experts.local_experts.{index}.linear_fc1.weight"] = fc1
                    found[f"{mlp}experts.local_experts.{index}.linear_fc2.weight"] = fc2
            if name == "qwen2_moe":
                shared = f"model.layers.{layer}.mlp.shared_expert"
                parts = [hf[f"{shared}.{one}_proj.weight"].chunk(grid.tp)[rank % grid.tp] for one in ("gate", "up")]
                down = hf[f"{shared}.down_proj.weight"].chunk(grid.tp, dim=1)[rank % grid.tp]
                found[mlp + "shared_experts.linear_fc1.weight"] = torch.cat(parts)
                found[mlp + "shared_experts.linear_fc2.weight"] = down
                found[mlp + "shared_experts.gate_weight"] = hf[shared + "_gate.weight"]
        assert {key for key in ours if ".mlp." in key} == found.keys()
        for key, tensor in found.items():
            assert torch.equal(ours[key], tensor), key
        assert "chunk0.decoder.layers.0.pre_mlp_layernorm.weight" in ours  # a module of its own, with TE too


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("tp, ep", [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_an_engine_rank_holds_its_experts_as_one_matrix(name, tp, ep):
    arch = MOE[name]
    hf = counted(arch)
    each, cut = EXPERTS // ep, tp // ep
    for rank in range(tp):
        ours = filled(native_layout(arch, tp, rank, "float32", ep_size=ep), hf)
        held = range(rank % ep * each, (rank % ep + 1) * each)
        for layer in range(arch.num_layers):
            pairs = list(of_experts(arch, hf, layer, held, cut, rank // ep))
            assert torch.equal(ours[f"layers.{layer}.experts_gate_up"], torch.cat([fc1 for fc1, _ in pairs]))
            assert torch.equal(ours[f"layers.{layer}.experts_down"], torch.cat([fc2 for _, fc2 in pairs]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "layouts"),
    [
        (native_layouts, [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]),
        (vllm_layouts, [(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)]),
    ],
)
@pytest.mark.parametrize("name", MOE)
def test_any_actor_layout_refits_any_engine_layout(name, engine, layouts):
    """Every element lands where it must, and no byte moves that need not: 35 pairs."""
    arch = MOE[name]
    hf = counted(arch)
    actors = [
        {},
        {"ep": 2},
        {"ep": 4},
        {"tp": 2, "etp": 1},
        {"tp": 2, "ep": 2, "etp": 1},
        {"tp": 2, "ep": 2},
        {"pp": 2, "ep": 2},
    ]
    for actor, (rollout_tp, rollout_ep) in itertools.product(actors, layouts):
        refitted(arch, ParallelLayout(8, **actor, rollout_tp=rollout_tp, rollout_ep=rollout_ep), hf, engine=engine)


@pytest.mark.parametrize(
    "actor",
    [
        {"tp": 2, "ep": 4, "etp": 1, "pp": 2},
        {"ep": 4, "etp": 4},
        {"tp": 4, "ep": 2, "cp": 2},
        {"tp": 2, "cp": 2, "ep": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", [(1, 1), (4, 4), (8, 2), (8, 4)], ids=str)
def test_sixteen_ranks_move_the_least(actor, engine):
    """Two ranks a host: what a host holds is taken there, and still no byte moves that need not."""
    arch, (rollout_tp, rollout_ep) = MOE["qwen2_moe"], engine
    grid = ParallelLayout(16, **actor, rollout_tp=rollout_tp, rollout_ep=rollout_ep)
    plan, _, _ = refitted(arch, grid, counted(arch), te=True, host_of=lambda rank: rank // 2)
    assert plan.bytes_moved > 0


@pytest.mark.parametrize(
    "grid, stages",
    [
        (ParallelLayout(2, pp=2, first_stage_layers=1), {(0, 0): [0], (1, 0): [1, 2, 3, 4, 5]}),
        (
            ParallelLayout(4, pp=4, first_stage_layers=1, last_stage_layers=1),
            {(0, 0): [0], (1, 0): [1, 2], (2, 0): [3, 4], (3, 0): [5]},
        ),
        (
            ParallelLayout(2, pp=2, vpp=2, last_stage_layers=2),
            {(0, 0): [0, 1], (1, 0): [2], (0, 1): [3, 4], (1, 1): [5]},
        ),
    ],
    ids=str,
)
def test_stages_may_be_uneven(grid, stages):
    arch = small("llama_tiny", num_hidden_layers=6)
    assert {place: list(layers) for place, layers in chunk_layers(arch, grid).items()} == stages


def layers_of(layout: Layout) -> set[str]:
    return {
        piece.hf_name.split(".")[2]
        for stored in layout.values()
        for piece in stored.pieces
        if ".layers." in piece.hf_name
    }


def test_uneven_stages_hold_their_layers():
    arch = small("llama_tiny", num_hidden_layers=6)
    grid = ParallelLayout(2, pp=2, last_stage_layers=2)
    first, last = (megatron_layout(arch, grid, rank, dtype="float32", te=False) for rank in range(2))
    assert layers_of(first) == set("0123")
    assert layers_of(last) == set("45")


@pytest.mark.parametrize(
    "grid, message",
    [
        (ParallelLayout(3, ep=3), r"expert_model_parallel_size=3 does not divide the model's experts \(4\)"),
        (
            ParallelLayout(8, etp=8),
            r"expert_tensor_parallel_size=8 does not divide the model's moe_intermediate_size \(20\)",
        ),
        (
            ParallelLayout(2, pp=2, first_stage_layers=3),
            r"num_layers_in_first_pipeline_stage=3 does not divide the model's 2 lay",
        ),
    ],
    ids=str,
)
def test_sizes_that_do_not_divide_are_named(grid, message):
    with pytest.raises(UserError, match=message):
        megatron_layout(MOE["qwen3_moe"], grid, 0, dtype="float32", te=False)


def test_an_engine_that_cannot_spread_its_experts_says_so():
    with pytest.raises(UserError, match=r"rollout\.expert_parallel_size=8 does not divide the model's experts"):
        native_layout(MOE["mixtral"], 8, 0, "float32", ep_size=8)
