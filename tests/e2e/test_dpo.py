"""`algorithm.name=dpo` as a user starts it: it prefers what the data prefer, and resumes as if nothing had happened."""

import json
import os
import signal
import time

import pytest

from mrl.commands.cli import main
from tests.e2e import runs

pytestmark = pytest.mark.slow

DPO = [
    "algorithm={name: dpo, kl_in: none, kl_coef: 0.001, entropy_coef: 0.0, dpo: {beta: 0.2}}",
    "~algorithm.clip_low",
    "~algorithm.clip_high",
    "train.minibatch_size=null",
    "train.num_steps=6",
    "train.eval_interval=3",
    "reference.update_interval=4",
    "checkpoint.interval=2",
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return runs.train_in_pool(tmp_path_factory.mktemp("whole"), DPO, 1)


def test_it_learns_what_is_preferred(uninterrupted):
    steps = [row for row in uninterrupted if "rewards/margins" in row]
    assert steps[0]["rewards/margins"] == 0  # the policy is the reference
    assert steps[3]["rewards/accuracies"] > 0.6 and steps[3]["rewards/margins"] > 0
    assert steps[4]["rewards/margins"] == 0  # and is again, after the step at which it became it


def test_a_killed_run_continues_as_if_nothing_had_happened(uninterrupted, tmp_path):
    process = runs.fork(tmp_path, DPO)
    file, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + runs.TIMEOUT_S
    while time.monotonic() < deadline and process.is_alive():
        if file.exists() and '"step": 3' in file.read_text():
            break
        time.sleep(0.005)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert runs.train_in_pool(tmp_path, DPO, 1) == uninterrupted


def test_four_ranks_have_one_ranks_numbers(uninterrupted, tmp_path):
    layout = ["parallel.tensor_model_parallel_size=2", "train.num_steps=3"]
    found = runs.train_in_pool(tmp_path, [*DPO, *layout], 4)
    first = next(row for row in found if "rewards/margins" in row)
    expected = next(row for row in uninterrupted if "rewards/margins" in row)
    for name in ("actor/loss", "actor/grad_norm", "logps/chosen", "logps/rejected"):
        assert first[name] == pytest.approx(expected[name], rel=1e-3), name


def test_without_held_out_prompts_there_is_no_engine(tmp_path, capsys):
    """Not of TensorRT-LLM either, which is not installed here."""
    rows = [{"prompt": f"<{i}+1>", "chosen": str(i + 1), "rejected": str(i + 2)} for i in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own = ["~data", f"data.train_files={tmp_path}/pairs.jsonl", "~reward", "train.eval_interval=0"]
    given = [*DPO, *own, "train.warm_start.num_steps=0", "train.num_steps=3"]
    found = runs.train_in_pool(tmp_path / "trtllm", [*given, "rollout.name=trtllm"], 2)
    assert [row["step"] for row in found] == [1, 2, 3]
    assert not any("rollout/" in name for row in found for name in row)
    config = runs.arguments(tmp_path / "plan", given)[1:]
    for words in (["plan", *config, "--world-size", "2"], ["train", *config, "--dry-run"]):
        assert main(words) == 0
        printed = capsys.readouterr().out
        assert "nothing is sampled" in printed and "engine's weights" not in printed and "KV cache" not in printed
