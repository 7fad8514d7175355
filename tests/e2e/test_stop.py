"""Told to stop, at any point: a commit, status 75 and one message; and then the numbers of a run that never stopped."""

import contextlib
import io
from pathlib import Path

import pytest

from tests.e2e import runs, told
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

STEPS = [
    *told.OWN,
    "train={num_steps: 5, eval_interval: 2, warm_start: {num_steps: 4, batch_size: 32}}",
    "reference.update_interval=3",
]
END_S = 60


def run_with(words, tell, ports):
    """On a rank: its status, and what it said last."""
    said = io.StringIO()
    told.reset(tell)
    with contextlib.redirect_stderr(said):
        status = runs.in_rank(words, ports)
    return status, "".join(said.getvalue().partition("mrl: ")[1:])  # without warnings of the first import


def train(folder, tell="", *more):
    """Status of the two ranks, and what rank 0 said; rank 1 said nothing."""
    Path(folder).mkdir(exist_ok=True)
    ports = [runs.free_port(), runs.free_port()]
    (first, said), (second, silent) = run_ranks(2, run_with, runs.arguments(folder, [*STEPS, *more]), tell, ports)
    assert first == second and silent == ""
    return first, said


def committed(folder):
    return sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-*"))


def test_a_stop_exports_only_where_the_time_of_a_checkpoint_is_known(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (
        train(tmp_path, "1 draw 40 SIGUSR1", "checkpoint.export_hf=true")[0] == 75
    )  # no checkpoint was written before
    assert not (checkpoints / "step-00000000" / "hf").exists()
    assert "megatron-to-hf" in (tmp_path / "run" / "notes.jsonl").read_text()
    assert train(tmp_path, "0 loss 3 SIGUSR1", "checkpoint.export_hf=true")[0] == 75
    assert sorted(path.parent.name for path in checkpoints.glob("*/hf")) == ["step-00000000", "step-00000002"]


def test_a_run_that_is_stopped_again_and_again_has_the_numbers_of_one_that_was_not(tmp_path):
    whole, often = tmp_path / "whole", tmp_path / "often"
    assert train(whole) == (0, "")
    for tell, after in (
        ("1 draw 40 SIGUSR1", "stopped by SIGUSR1 after warm start step 2; its checkpoint was written"),
        ("0 held_out 0 SIGUSR1", "stopped by SIGUSR1 after warm start step 4; its checkpoint was written"),
        ("1 draw 5 SIGTERM", "stopped by SIGTERM after step 0; its checkpoint existed already"),
        ("0 draw 12 SIGUSR1", "stopped by SIGUSR1 after step 1; its checkpoint was written"),
        ("0 held_out 1 SIGTERM", "stopped by SIGTERM after step 2; its checkpoint was written"),
        ("1 loss 1 SIGUSR1", "stopped by SIGUSR1 after step 3; its checkpoint was written"),
        ("0 score 1 SIGUSR1", "stopped by SIGUSR1 after step 3; its checkpoint existed already"),
    ):
        status, said = train(often, tell)
        assert (status, said.splitlines()[0]) == (75, f"mrl: {after}."), tell
        assert "Continue with: the same launcher with -m mrl train " in said
    assert train(often) == (0, "")
    assert runs.metrics(often) == runs.metrics(whole)
