"""Checkpoints of adapters load at any layout, go on with the same numbers, and belong to one model and its settings."""

import json
import math
from dataclasses import replace

import pytest
import torch

from mrl.algorithms.functional.learning_rate import LearningRate
from mrl.checkpoint.formats.checkpoint_metadata import COMMON_STATE, METADATA
from mrl.config.config import LoraConfig
from mrl.errors import UserError
from mrl.megatron import checkpoint
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.random_init import random_init
from tests.megatron.actors import (
    ARCHS,
    EXPERT_LAYOUTS,
    LAYOUTS,
    MIXTURES,
    SEED,
    fill_adapters,
    full_adapters,
    full_weights,
    make_policy,
    train,
)
from tests.ranks import RankError, run_ranks

MODELS, GRIDS = {**ARCHS, **MIXTURES}, {**LAYOUTS, **{f"e_{name}": grid for name, grid in EXPERT_LAYOUTS.items()}}
GRIDS["tp4"] = ParallelLayout(4, tp=4)  # more ranks than key/value heads
LORA = LoraConfig(rank=3, alpha=12.0)
RATE = LearningRate(1e-3, 0.0, "linear", 0, 4)
RELATIVE, ABSOLUTE = 1e-4, 2e-6


def actor(name, grid, lora=LORA, *, seed=SEED, **options):
    return make_policy(MODELS[name], grid, actor={"lora": lora}, seed=seed, **options)


def saved(folder, name, grid, options):
    policy = actor(name, grid, **options)
    fill_adapters(policy)
    policy.start_optimizer(RATE)
    train(policy, 2)
    checkpoint.save(folder, policy)
    adapters = full_adapters(policy)
    return adapters, train(policy, 2, first=2), policy.base_checksum()


def resumed(folder, name, grid, options):
    policy = actor(name, grid, **options)
    policy.start_optimizer(RATE)
    before = full_weights(policy)
    checkpoint.load(folder, policy)
    after = full_weights(policy)
    assert all(torch.equal(before[key], after[key]) for key in before)
    return full_adapters(policy), train(policy, 2, first=2), policy.base_checksum()


EXPERTS = replace(LORA, target_modules=["gate_proj", "up_proj", "down_proj"])  # Megatron's dense optimizer has none
ONE_LAYER = replace(LORA, target_modules=["layers.3.mlp.up_proj"])  # and a pipeline stage has none
SHARED = replace(LORA, share_expert_adapters=True)
CASES = [
    ("qwen2_moe", "e_ep2", "single", {"lora": SHARED}),
    ("qwen2_moe", "single", "e_tp2_ep2_etp2", {"lora": SHARED}),
    pytest.param("qwen2_moe", "e_ep2_pp2", "e_ep2_dp2", {"lora": SHARED}, marks=pytest.mark.slow),
    ("qwen2_moe", "e_ep2_pp2", "e_ep2_dp2", {}),
    ("qwen3_moe", "e_ep2", "single", {"lora": EXPERTS}),
    ("qwen3_moe", "single", "e_tp2_ep2_etp2", {"lora": EXPERTS}),
    ("qwen2", "tp2_pp2", "single", {"lora": ONE_LAYER}),
    ("qwen2", "pp2_vpp2", "dp2", {"lora": ONE_LAYER}),
    ("qwen2", "tp2_pp2", "single", {}),
    ("qwen2", "tp2_pp2", "tp2_pp2", {}),
    ("qwen2", "tp2_pp2", "tp4", {}),
    ("qwen2", "single", "tp2_pp2", {}),
    ("qwen2", "pp2_vpp2", "dp2", {}),
    ("qwen2_untied", "dp2", "tp2", {}),
    ("qwen2_moe", "e_tp2_ep2_etp2", "single", {}),
    ("qwen2_moe", "e_ep2_pp2", "e_tp2_ep2", {}),
    ("qwen2", "tp2", "dp2", {"dtype": "bfloat16"}),
    ("qwen2", "dp2", "tp2", {"dtype": "bfloat16", "lora": replace(LORA, dtype="float32")}),
]


@pytest.mark.parametrize(("name", "source", "target", "options"), CASES, ids=str)
def test_training_goes_on_at_another_layout(name, source, target, options, tmp_path):
    folder = tmp_path / "actor"
    given = dict(options)
    adapters, metrics, checksum = run_ranks(GRIDS[source].world_size, saved, folder, name, GRIDS[source], given)[0]
    for found, going_on, other in run_ranks(GRIDS[target].world_size, resumed, folder, name, GRIDS[target], given):
        assert other == checksum
        assert found.keys() == adapters.keys()
        assert all(torch.equal(found[key], adapters[key]) for key in adapters)
        if "dtype" not in options:
            for ours, theirs in zip(going_on, metrics, strict=True):
                for key in theirs:
                    assert math.isclose(ours[key], theirs[key], rel_tol=RELATIVE, abs_tol=ABSOLUTE), key
    names = checkpoint.read_safe_metadata(folder / METADATA)
    assert len(names) > 1 and all("lora_" in name for name in names if name != COMMON_STATE)


def load_into(folder, lora, seed, dtype, full):
    policy = (
        actor("qwen2", LAYOUTS["single"], lora, seed=seed, dtype=dtype)
        if not full
        else make_policy(ARCHS["qwen2"], LAYOUTS["single"])
    )
    checkpoint.load(folder, policy)


OTHERS = {
    "rank": (replace(LORA, rank=4), SEED, "float32", False),
    "scale": (replace(LORA, alpha=6.0), SEED, "float32", False),
    "use_rslora": (replace(LORA, use_rslora=True), SEED, "float32", False),
    "target_modules": (replace(LORA, target_modules=["q_proj"]), SEED, "float32", False),
    "exclude_modules": (replace(LORA, exclude_modules=["q_proj"]), SEED, "float32", False),
    "base": (LORA, SEED + 1, "float32", False),
    "dtype": (LORA, SEED, "bfloat16", False),
    "none": (LORA, SEED, "float32", True),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "actor"
    run_ranks(1, saved, folder, "qwen2", LAYOUTS["single"], {})
    return folder


@pytest.mark.parametrize("what", OTHERS)
def test_another_model_or_other_settings_are_refused(what, written):
    with pytest.raises(RankError, match="UserError") as caught:
        run_ranks(1, load_into, written, *OTHERS[what])
    key = {"base": "base_checksum", "dtype": "base_checksum", "none": "actor.lora.rank=0", "use_rslora": "scale"}.get(
        what, what
    )
    assert key in str(caught.value)


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_another_spelling_of_the_same_modules_is_taken(written):
    run_ranks(1, load_into, written, replace(LORA, target_modules=ALL), SEED, "float32", False)


def changed(folder, lora, other):
    policy = actor("qwen3_moe", LAYOUTS["single"], lora)
    fill_adapters(policy)
    checkpoint.save(folder, policy)
    try:
        checkpoint.load(folder, actor("qwen3_moe", LAYOUTS["single"], other))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("settings", [(LORA, SHARED), (SHARED, LORA)], ids=["unshared", "shared"])
def test_adapters_of_experts_stay_shared_or_not(settings, tmp_path):
    assert "share_expert_adapters" in run_ranks(1, changed, tmp_path / "actor", *settings)[0]


def load_full(folder, full):
    full_policy = make_policy(ARCHS["qwen2"], LAYOUTS["single"])
    checkpoint.save(folder, full_policy)
    try:
        checkpoint.load(folder, actor("qwen2", LAYOUTS["single"]))
    except UserError as error:
        return str(error)


def test_a_checkpoint_without_adapters_is_refused(tmp_path):
    assert "no adapters" in run_ranks(1, load_full, tmp_path / "actor", True)[0]


def checksums(grid, seed, part):
    policy = actor("qwen2_untied", grid, seed=None)
    random_init(ARCHS["qwen2_untied"], policy.layout(), policy.named_tensors(), seed)
    if part:
        next(iter(policy.named_tensors().values()))[0, 0] += 1e-3
    return policy.base_checksum()


def test_the_checksum_of_the_model_depends_on_every_weight_and_not_on_the_layout():
    found = {run_ranks(GRIDS[name].world_size, checksums, GRIDS[name], 5, False)[0] for name in LAYOUTS}
    assert len(found) == 1
    others = {run_ranks(1, checksums, LAYOUTS["single"], *case)[0] for case in ((6, False), (5, True))}
    assert len(found | others) == 3
    assert json.dumps(sorted(found | others))
