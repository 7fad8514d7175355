"""kill -9 at any moment, the same command again: the numbers of a run that was never interrupted."""

import os
import random
import signal
import time

import pytest

from tests.e2e import runs

STEPS = ["train.num_steps=8", "checkpoint.interval=2", "train.eval_interval=2", "reference.update_interval=3"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return runs.train(tmp_path_factory.mktemp("whole"), STEPS)


def kill_after(process, folder, num_lines):
    """SIGKILL to the whole session once metrics.jsonl has so many lines."""
    file = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + runs.TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists() and file.read_bytes().count(b"\n") >= num_lines:
            break
        time.sleep(0.005)
    time.sleep(random.random() * 0.3)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("num_lines", [2, 7, 11])
def test_a_killed_run_continues_as_if_nothing_had_happened(num_lines, uninterrupted, tmp_path):
    process = runs.start(tmp_path, STEPS)
    kill_after(process, tmp_path, num_lines)
    assert runs.train(tmp_path, STEPS) == uninterrupted
    references = [folder.name for folder in (tmp_path / "run" / "checkpoints").glob("reference-*")]
    assert references == ["reference-00000006"]  # of the two commits that are kept


def test_a_run_resumes_at_another_layout_with_the_same_prompts(uninterrupted, tmp_path):
    layout = ["parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"]
    runs.train(tmp_path, [*STEPS, "train.num_steps=4", *layout], ranks=4)
    found = runs.train(tmp_path, STEPS)
    assert [row["training/epoch"] for row in found if "training/epoch" in row] == [
        row["training/epoch"] for row in uninterrupted if "training/epoch" in row
    ]
    last, expected = found[-1], uninterrupted[-1]
    assert last["step"] == expected["step"] == 8
    assert last["prompt_length/mean"] == expected["prompt_length/mean"]
