"""True on-policy runs from the command line: sampled and trained log-probabilities are equal at every step."""

import pytest

from tests.e2e import runs

pytestmark = [pytest.mark.compiler, pytest.mark.slow]

EQUAL = (
    "training/rollout_probs_diff_max",
    "training/rollout_logprobs_diff_max",
    "training/rollout_logprobs_differing",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/log_ppl_abs_diff",
)
BOTH_TP2 = ("parallel.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2")
RUNS = {
    "fp32": (1, ("rollout.temperature=0.8", "actor.max_tokens_per_microbatch=24")),
    "bf16 truncated": (1, ("model.dtype=bfloat16", "rollout.top_p=0.9")),
    "tp2": (2, BOTH_TP2),
    "tp2 sp bf16 recomputed": (
        2,
        (*BOTH_TP2, "parallel.sequence_parallel=true", "model.dtype=bfloat16", "actor.recompute=full"),
    ),
    "dp2 bf16": (2, ("model.dtype=bfloat16", "rollout.max_num_seqs=3", "rollout.max_num_batched_tokens=7")),
    "pp2 async": (2, ("parallel.pipeline_model_parallel_size=2", "train={mode: async, max_off_policy_steps: 0}")),
}


def steps(rows):
    return [row for row in rows if row["phase"] == "train" and row["step"] > 0]


@pytest.mark.parametrize("name", RUNS)
def test_nothing_differs_at_any_step(name, tmp_path):
    ranks, overrides = RUNS[name]
    found = steps(runs.train_in_pool(tmp_path, ["rollout.true_on_policy=true", *overrides], ranks))
    assert len(found) == 3
    for row in found:
        assert {key: row[key] for key in EQUAL} == dict.fromkeys(EQUAL, 0.0)
        assert row["training/rollout_probs_diff_valid"] == 1.0
        assert row["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
        assert row["actor/grad_norm"] > 0


def test_without_the_mode_the_same_run_differs(tmp_path):
    (ranks, overrides) = RUNS["bf16 truncated"]
    for row in steps(runs.train_in_pool(tmp_path, overrides, ranks)):
        assert row["training/rollout_probs_diff_max"] > 0.0 and row["rollout_corr/k3_kl"] > 0.0
        assert "training/rollout_logprobs_diff_max" not in row
