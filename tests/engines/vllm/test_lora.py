"""vLLM samples with low-rank adapters that weight sync writes beside its weights."""

import pytest

from tests.e2e.test_layouts import assert_same
from tests.e2e.test_lora import BESIDE, LARGE, check, trained, without_costs

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_ranks")]

VLLM = [
    "rollout.name=vllm", "rollout.gpu_memory_utilization=0.02", "model.overrides.hidden_size=64",
    "model.overrides.num_attention_heads=2", "model.overrides.num_key_value_heads=1",
]  # fmt: skip


@pytest.mark.parametrize(
    "settings", [[BESIDE], [BESIDE, "actor.lora.target_modules=[q_proj, v_proj, up_proj]"]], ids=str
)
def test_vllm_samples_with_adapters_beside_the_weights(settings, tmp_path):
    expected = trained(tmp_path / "merged", [*LARGE, *VLLM, *settings, "actor.lora.merge=true"], 1)
    found = trained(tmp_path / "beside", [*LARGE, *VLLM, *settings], 1)
    for rows in (expected, found):
        check(rows)
    assert_same(without_costs(found), without_costs(expected))
    layout = ["parallel.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2"]
    moved = trained(tmp_path / "two", [*LARGE, *VLLM, *settings, *layout], 2)
    check(moved)
    assert_same(without_costs(moved), without_costs(expected))
