"""The nearest layout that works: what the error proposes passes all checks and divides ranks and model."""

import pytest

from mrl.config.config import load
from mrl.errors import UserError
from mrl.trainer.run_plan import resolve

TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
EP, ETP = "parallel.expert_model_parallel_size", "parallel.expert_tensor_parallel_size"
ROLLOUT_TP = "rollout.tensor_model_parallel_size"

BASE = {
    "model": {"preset": "qwen3_moe_tiny", "tokenizer": "char:0123456789<>+#"},
    "rollout": {"prompt_length": 64, "response_length": 64},
    "train": {"num_steps": 2},
    "data": {"task": "addition"},
    "reward": {"functions": [{"name": "exact_match"}]},
}
SEQUENCE = "parallel.sequence_parallel=true"


def advised(overrides, world_size):
    with pytest.raises(UserError) as caught:
        resolve(load(BASE, overrides), world_size)
    text = str(caught.value)
    start = f"The nearest layout that works on {world_size} ranks: "
    return text.partition(start)[2].split() if start in text else None


@pytest.mark.parametrize(
    ("overrides", "world_size", "changes"),
    [
        ([f"{EP}=8"], 8, {f"{EP}=4"}),  # 4 experts
        ([f"{ROLLOUT_TP}=8"], 8, {f"{ROLLOUT_TP}=4"}),  # 4 heads
        ([f"{PP}=3"], 6, {f"{PP}=2"}),  # 4 layers
        ([f"{TP}=4", SEQUENCE, f"{EP}=4"], 4, {f"{ETP}=1"}),  # experts are tensor-parallel, too, unless ETP is 1
    ],
)
def test_the_nearest_layout_passes_all_checks(overrides, world_size, changes):
    found = advised(overrides, world_size)
    assert set(found) == changes
    assert resolve(load(BASE, [*overrides, *found]), world_size).grid.world_size == world_size


@pytest.mark.parametrize(("overrides", "world_size"), [([f"{TP}=3", SEQUENCE], 6), ([f"{TP}=4", SEQUENCE], 6)])
def test_a_proposal_of_several_keys_works(overrides, world_size):
    found = advised(overrides, world_size)
    assert found
    resolve(load(BASE, [*overrides, *found]), world_size)


def test_other_errors_get_no_layout():
    assert advised(["rollout.prompt_length=100000"], 4) is None
    assert advised([f"{TP}=3", "rollout.prompt_length=100000"], 6) is None  # no layout mends the length
