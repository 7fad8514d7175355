"""A sample without a score is neither trained nor in a mean, and the run goes on and says so."""

import pytest

from tests.e2e import runs

pytestmark = pytest.mark.slow

REWARD = """
def sometimes(*, prompt, response, answer, extra):
    if sum(map(ord, prompt + response)) % 3 == 0:
        raise ConnectionError("no judge answers")
    return 5.0 + 0.5 * len(response)
"""
SAMPLES = 32


def test_a_sample_without_a_score_counts_nowhere_and_the_run_goes_on(tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    named = f"reward={{functions: [{{name: '{tmp_path}/mine.py:sometimes'}}], max_failed_frac: 1.0}}"
    rows = runs.train_in_pool(tmp_path, [named, "train.num_steps=1", "train.warm_start.num_steps=1"], 2)
    (step,) = [row for row in rows if "critic/score/mean" in row]
    assert 0 < step["reward/num_missing"] < SAMPLES
    assert step["reward/failed_frac"] == step["reward/num_missing"] / SAMPLES
    assert 5.0 <= step["critic/score/min"] <= step["critic/score/mean"] == step["reward/sometimes/mean"]
    held_out = [row for row in rows if row.get("val/num_missing", 0) > 0]
    assert held_out and all(row["val/reward/min"] >= 5.0 for row in held_out)
    said = (tmp_path / "run" / "notes.jsonl").read_text()
    assert "have no score and are left out: reward" in said and "no judge answers" in said
