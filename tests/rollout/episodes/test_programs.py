"""An agent program in a training run: what it heard is what was sampled, and what it said is observed."""

import json
import sys
from pathlib import Path

import pytest

from tests.e2e import runs
from tests.source import ROOT

AGENT = ROOT / "tests" / "environments" / "echo_agent.py"
FIELDS = [
    "rollout.multi_turn.enable=true", "rollout.multi_turn.max_assistant_turns=2", "rollout.response_length=16",
    "rollout.agent.environment=program", "rollout.agent.num_workers=2", "train.num_steps=2", "train.batch_size=4",
    "train.minibatch_size=4", "rollout.n=2", "observe.num_samples=16", "reward.max_failed_frac=1",
    "reward.functions=[{name: environment}]", "data.task_kwargs.num_val=2",
]  # fmt: skip


@pytest.mark.slow
def test_a_run_trains_on_what_a_program_heard(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = f"rollout.agent.environment_kwargs={{command: [{sys.executable}, {AGENT}]}}"
    told = runs.train_in_pool(tmp_path, [*FIELDS, command], 1)
    assert all(1 <= step["num_turns/mean"] <= 2 for step in told if "num_turns/mean" in step)
    rows = [json.loads(line) for line in Path(tmp_path, "run", "samples.jsonl").read_text().splitlines()]
    whole = [row for row in rows if row["episode_end"] == "finished"]
    assert whole
    for row in whole:
        first, said, second = row["turns"]
        assert [turn["by"] for turn in row["turns"]] == ["policy", "environment", "policy"]
        assert said["text"] == (first["text"][:3] or "+") and row["reward"] == len(first["text"])
        assert row["response"] == f"{first['text']}#{said['text']}{second['text']}#"  # "#" ends what is sampled
