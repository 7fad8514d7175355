"""Runs with low-rank adapters: the engine samples with them, in every layout, merged or beside the weights."""

import pytest

from tests.e2e import runs
from tests.e2e.test_layouts import assert_same

pytestmark = pytest.mark.slow

LARGE = [
    "train.num_steps=3", "train.warm_start.num_steps=2", "train.warm_start.lr=0.05", "actor.lora.rank=6",
    "actor.lora.alpha=24", "actor.lr=0.02", "algorithm.kl_in=none", "algorithm.kl_coef=0.001",
]  # fmt: skip
BESIDE = "actor.lora.merge=false"
SHARE = "actor.lora.share_expert_adapters=true"
MIXTURE = [
    "actor.lr=0.004",
    "model.preset=qwen3_moe_tiny",
    "model.overrides={hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, "
    "head_dim: 16, moe_intermediate_size: 32}",
]
TP2 = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
MOVED = ("refit/bytes_local", "refit/bytes_moved", "refit/bytes_lower_bound")
EXACT = 1e-5


def trained(folder, settings, ranks):
    rows = [row for row in runs.train_in_pool(folder, settings, ranks) if "actor/pg_loss" in row]
    assert len(rows) == 3
    return rows


def without_costs(rows):
    return [{name: value for name, value in row.items() if name not in MOVED} for row in rows]


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("merged"), LARGE, 1)


def check(rows):
    assert all(row["training/rollout_probs_diff_max"] < EXACT for row in rows)
    assert max(abs(row["rollout_corr/kl"]) for row in rows) < EXACT


def test_the_engine_samples_with_merged_adapters(merged):
    check(merged)


LAYOUTS = [
    ([BESIDE], 1),
    ([BESIDE, *TP2, "rollout.tensor_model_parallel_size=2"], 2),
    ([*TP2, "parallel.pipeline_model_parallel_size=2"], 4),
    ([BESIDE, "rollout.num_ranks=1"], 2),
]


@pytest.mark.parametrize(("settings", "ranks"), LAYOUTS, ids=str)
def test_every_layout_trains_to_the_same_numbers(settings, ranks, merged, tmp_path):
    found = trained(tmp_path, [*LARGE, *settings], ranks)
    check(found)
    assert_same(without_costs(found), without_costs(merged))


def adapter_bytes(rank):
    sizes = {"q": 32, "kv": 16, "h": 32, "ffn": 64}
    pairs = [("h", "q"), ("h", "kv"), ("h", "kv"), ("q", "h"), ("h", "ffn"), ("h", "ffn"), ("ffn", "h")]
    return 2 * 4 * rank * sum(sizes[a] + sizes[b] for a, b in pairs)


@pytest.mark.parametrize(("settings", "ranks", "copies"), [([BESIDE], 1, 1), ([BESIDE, "rollout.num_ranks=1"], 2, 1)])
def test_a_sync_of_adapters_moves_their_bytes_alone(settings, ranks, copies, tmp_path):
    for row in trained(tmp_path, [*LARGE, *settings], ranks):
        assert row["refit/bytes_local"] + row["refit/bytes_moved"] == copies * adapter_bytes(6)


@pytest.mark.parametrize("settings", [
    [], [BESIDE], [BESIDE, "actor.lora.target_modules=[q_proj, down_proj]"], [SHARE], [BESIDE, SHARE],
], ids=str)  # fmt: skip
def test_experts(settings, tmp_path):
    expected = trained(tmp_path / "one", [*LARGE, *MIXTURE, *settings], 1)
    check(expected)
    layout = [
        *TP2, "parallel.expert_model_parallel_size=2", "parallel.expert_tensor_parallel_size=1",
        "rollout.tensor_model_parallel_size=2", "rollout.expert_parallel_size=2",
    ]  # fmt: skip
    found = trained(tmp_path / "two", [*LARGE, *MIXTURE, *settings, *layout], 2)
    check(found)
    assert_same(without_costs(found), without_costs(expected))


def test_adapters_stay_exact_beside_weights_in_fp8(tmp_path):
    """The base is rounded once; merged weights are rounded anew in every sync, with the adapters in them."""
    fp8 = ["rollout.quantization=fp8_per_tensor"]
    for settings in ([], [BESIDE]):
        rows = trained(tmp_path / str(len(settings)), [*LARGE, *fp8, *settings], 1)
        assert all(0 < row["training/rollout_probs_diff_max"] < 0.2 for row in rows)
