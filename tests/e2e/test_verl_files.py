"""verl's parquet rows and its own reward file train as they are, with TRL's reward beside it."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from mrl.commands.cli import main
from tests.e2e.test_docs import QUIET, model_folder
from tests.rewards.test_signatures import GSM8K, ROWS

pytestmark = pytest.mark.slow

CONFIG = """
run: {output_dir: run, num_threads: 1}
model: {path: model, dtype: float32}
data: {train_files: [train.parquet], val_files: [train.parquet]}
train: {batch_size: 4, minibatch_size: 4, eval_interval: 1}
actor: {lr: 1.0e-6, max_tokens_per_microbatch: 512}
rollout: {n: 2, prompt_length: 96, response_length: 8, max_num_seqs: 8, gpu_memory_utilization: 0.01}
"""


def test_a_parquet_and_a_reward_file_of_verl_and_a_reward_of_trl_train_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "model")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "train.parquet")
    functions = [{"name": f"{GSM8K}:compute_score"}, {"name": "trl.rewards:think_format_reward", "weight": 0.5}]
    (tmp_path / "run.yaml").write_text(
        CONFIG + f"reward: {json.dumps({'functions': functions, 'time_limit_s': 60.0})}\n"
    )
    assert main(["train", "run.yaml", *QUIET]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    step = next(row for row in rows if "critic/score/mean" in row)
    assert step["reward/failed_frac"] == step["reward/num_missing"] == 0
    assert {"reward/compute_score/mean", "reward/think_format_reward/mean"} <= set(step)
    assert step["train/openai/gsm8k/frac"] == 1.0
    assert any("val-core/openai/gsm8k/reward/mean@1" in row for row in rows)
