"""Whole runs that sample with vLLM: the numbers of one rank in every layout, and after kill -9."""

import pytest

from tests.e2e import runs
from tests.e2e.test_layouts import assert_same
from tests.e2e.test_resume import kill_after

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_ranks")]

SHORT = (
    "train.num_steps=3", "rollout.name=vllm", "rollout.temperature=0.8", "rollout.gpu_memory_utilization=0.02",
    "checkpoint.interval=1", "model.overrides.hidden_size=64", "model.overrides.num_attention_heads=2",
    "model.overrides.num_key_value_heads=1",
)  # fmt: skip
MISMATCH = 1e-4
"""Of log-probabilities, sampler against trainer; the project's bound in fp32."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return runs.train_in_pool(tmp_path_factory.mktemp("one"), SHORT, 1)


def test_the_actor_scores_what_vllm_sampled_as_vllm_does(expected):
    rows = [row for row in expected if "rollout_corr/kl" in row]
    assert len(rows) == 3
    assert all(abs(row["rollout_corr/kl"]) < MISMATCH for row in rows)


def test_four_ranks_train_to_the_same_numbers(tmp_path, expected):
    layout = (
        "parallel.tensor_model_parallel_size=2",
        "parallel.pipeline_model_parallel_size=2",
        "rollout.tensor_model_parallel_size=2",
    )
    assert_same(runs.train_in_pool(tmp_path, [*SHORT, *layout], 4), expected)


def test_a_killed_run_continues_as_if_nothing_had_happened(tmp_path, expected):
    kill_after(runs.fork(tmp_path, SHORT), tmp_path, 2)
    assert runs.train_in_pool(tmp_path, SHORT, 1) == expected


def test_replicas_on_ranks_of_their_own_train_to_the_same_numbers(tmp_path, expected):
    layout = ("rollout.num_ranks=2", "rollout.tensor_model_parallel_size=2", "parallel.tensor_model_parallel_size=2")
    assert_same(runs.train_in_pool(tmp_path, [*SHORT, *layout], 4), expected)
