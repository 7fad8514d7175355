"""GRPO on models with linear attention: actor and engine agree, at one layout and resumed at others."""

import pytest

from tests.e2e import runs
from tests.e2e.test_experts import updates
from tests.e2e.test_layouts import assert_same

pytestmark = pytest.mark.slow

AGREE = 1e-5
SIZES = "hidden_size: 32, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2"
NEXT = ["model.preset=qwen3_next_tiny", f"model.overrides={{{SIZES}, moe_intermediate_size: 32}}"]
TEXT = ["model.preset=qwen3_5_text_tiny", f"model.overrides={{{SIZES}}}"]
TP2 = [
    "parallel.tensor_model_parallel_size=2",
    "parallel.sequence_parallel=true",
    "rollout.tensor_model_parallel_size=2",
]
EP2 = [
    "parallel.expert_model_parallel_size=2",
    "parallel.expert_tensor_parallel_size=1",
    "rollout.expert_parallel_size=2",
]
FEW_ROWS = ["rollout.max_num_seqs=5"]  # samples of a prompt start at different times


def assert_agree(rows):
    found = [row["training/rollout_probs_diff_max"] for row in rows if "training/rollout_probs_diff_max" in row]
    assert found and max(found) < AGREE


@pytest.mark.parametrize(
    ("settings", "ranks"), [([], 1), (FEW_ROWS, 1), ([*TP2, *EP2], 2), (["actor.recompute=selective"], 1)], ids=str
)
def test_the_engine_samples_with_the_probabilities_of_the_actor(settings, ranks, tmp_path):
    assert_agree(runs.train_in_pool(tmp_path, [*NEXT, *settings, "train.num_steps=2"], ranks))


def test_a_run_resumes_at_other_layouts(tmp_path):
    alone = runs.train_in_pool(tmp_path / "alone", TEXT, 1)
    spread = [*TEXT, *TP2, "parallel.pipeline_model_parallel_size=2"]
    runs.train_in_pool(tmp_path / "spread", [*spread, "train.num_steps=2"], 4)
    found = runs.train_in_pool(tmp_path / "spread", [*TEXT, "run.resume=must"], 2)
    assert_agree(found)
    assert_same(updates(found), updates(alone))
