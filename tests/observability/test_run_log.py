"""What a run leaves behind, and that a resumed run leaves the same."""

import json

import pytest

from mrl.checkpoint.io.jsonl_log import read_rows
from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.config import registry
from mrl.errors import UserError
from mrl.observability.loggers.base import Logger
from mrl.observability.metrics import is_wall_clock
from mrl.observability.run_log import RunLog, sample_rows
from mrl.types import Prompt, Rollout
from tests.observability.folders import config, logging, metrics_of, row, run_steps


def begin(log):
    log.warm_start(1, {"actor/loss": 2.5, "timing_s/step": 0.1})
    log.evaluation(0, {"val/accuracy": 0.0})
    log.samples(0, [row(response="?")])


def test_metrics_hold_what_identical_runs_share_and_timings_the_rest(tmp_path):
    with logging(tmp_path, warm_start=1) as (run, log):
        begin(log)
        run_steps(log, 1, 2)
    metrics, timings = read_rows(run.metrics), read_rows(run.timings)
    assert [(line["phase"], line["step"]) for line in metrics] == [
        ("warm_start", 1), ("train", 0), ("train", 1), ("train", 2)
    ]  # fmt: skip
    assert metrics[0] == {"step": 1, "phase": "warm_start", "warm_start/loss": 2.5}
    assert not any(is_wall_clock(name) for line in metrics for name in line)
    assert all(is_wall_clock(name) for line in timings for name in line if name not in ("step", "phase"))
    joined = {**metrics[2], **timings[1]}
    assert joined == {"step": 1, "phase": "train", "val/accuracy": 1 / 8, **metrics_of(1)}


@pytest.mark.parametrize("killed_after", [2, 4, 7])
def test_a_resumed_run_writes_the_same_bytes_as_one_never_interrupted(tmp_path, killed_after):
    with logging(tmp_path / "whole", warm_start=1) as (whole, log):
        begin(log)
        run_steps(log, 1, 8)
    with logging(tmp_path / "cut", warm_start=1) as (cut, log):
        begin(log)
        run_steps(log, 1, killed_after)
    with cut.metrics.open("ab") as stream:
        stream.write(b'{"step": 9, "phase"')
    with logging(tmp_path / "cut", warm_start=1, resume_step=2) as (_, log):
        run_steps(log, 3, 8)
    assert cut.metrics.read_bytes() == whole.metrics.read_bytes()
    assert cut.samples.read_bytes() == whole.samples.read_bytes()
    assert cut.timings.read_bytes() == whole.timings.read_bytes()


def test_a_warm_start_that_was_stopped_and_then_killed_goes_on_after_its_checkpoint(tmp_path):
    with logging(tmp_path, warm_start=4) as (_, log):
        for step in (1, 2, 3):
            log.warm_start(step, {"actor/loss": 2.5, "timing_s/step": 0.1})
    with logging(tmp_path, warm_start=4, resume_step=0) as (run, log):
        log.warm_start_resumed(1)
        log.warm_start(2, {"actor/loss": 1.5, "timing_s/step": 0.1})
    assert [(line["step"], line["warm_start/loss"]) for line in read_rows(run.metrics)] == [(1, 2.5), (2, 1.5)]
    assert [line["step"] for line in read_rows(run.timings)] == [1, 2]


def test_a_run_that_never_reached_a_checkpoint_starts_over(tmp_path):
    for _ in range(2):
        with logging(tmp_path) as (run, log):
            begin(log)
    assert [(line["phase"], line["step"]) for line in read_rows(run.metrics)] == [("warm_start", 1), ("train", 0)]
    assert len(read_rows(run.samples)) == 1


def test_an_evaluation_that_a_resumed_run_repeats_is_there_once(tmp_path):
    with logging(tmp_path) as (run, log):
        begin(log)
    with logging(tmp_path, resume_step=0) as (run, log):
        log.evaluation(0, {"val/accuracy": 0.0})
        log.samples(0, [row(response="?")])
    assert len(read_rows(run.samples)) == 1
    assert len(read_rows(run.metrics)) == 2


def test_only_rank_0_writes(tmp_path):
    made = config(tmp_path)
    with RunLog(made, RunDir(tmp_path / "other"), None, rank=1) as log:
        begin(log)
        log.note("nothing")
    assert list(tmp_path.iterdir()) == []


def test_notes_outlive_a_new_start(tmp_path):
    for text in ("first", "second"):
        with logging(tmp_path) as (run, log):
            log.note(text)
    assert [line["text"] for line in read_rows(run.notes, by_step=False)] == ["first", "second"]


def test_sample_rows_hold_what_a_reader_needs():
    prompt = Prompt(5, (1, 2), "1+2=", answer="3")
    rollout = Rollout(prompt, 1, [3, 4], [0.0, 0.0], "length", 0, "3", 0.5, {"exact_match": 1.0})
    (found,) = sample_rows([rollout, rollout], phase="train", num_samples=1)
    assert json.loads(json.dumps(found)) == row(
        "train", uid=5, sample_index=1, reward=0.5, finish_reason="length", response_length=2
    )


def test_every_file_in_the_folder_is_a_logger(tmp_path):
    assert registry.names("observability.loggers") == ["console", "files", "tensorboard", "text_log", "wandb"]


def test_tensorboard_holds_every_metric_and_hides_what_lies_beyond_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with logging(tmp_path, tensorboard=True, warm_start=1) as (run, log):
        begin(log)
        run_steps(log, 1, 4)
    with logging(tmp_path, tensorboard=True, warm_start=1, resume_step=2) as (run, log):
        run_steps(log, 3, 3)
    train = EventAccumulator(str(run.tensorboard / "train")).Reload()
    assert set(metrics_of(1)) | {"val/accuracy"} <= set(train.Tags()["scalars"])
    assert [event.step for event in train.Scalars("critic/score/mean")] == [1, 2, 3]
    warm = EventAccumulator(str(run.tensorboard / "warm_start")).Reload()
    assert [event.step for event in warm.Scalars("warm_start/loss")] == [1]


LOGGER = """
import mrl

class Lines(mrl.Logger):
    def __init__(self, opening):
        self.file = opening.run.root / opening.kwargs["file"]

    def record(self, phase, step, metrics):
        with self.file.open("a") as stream:
            print(phase, step, *sorted(metrics), file=stream)
"""


def test_a_logger_of_ones_own_gets_its_kwargs_and_every_metric(tmp_path):
    (tmp_path / "own.py").write_text(LOGGER)
    given = [{"name": f"{tmp_path}/own.py:Lines", "kwargs": {"file": "lines.txt"}}]
    with logging(tmp_path / "run", loggers=given) as (run, log):
        run_steps(log, 1, 2)
    lines = (run.root / "lines.txt").read_text().splitlines()
    assert {line.split()[1] for line in lines if line.startswith("train")} == {"1", "2"}
    assert {name for line in lines for name in line.split()[2:]} >= set(metrics_of(1))


def test_an_entry_for_a_logger_that_another_key_enables_is_refused(tmp_path):
    with (
        pytest.raises(UserError, match=r"observe.loggers names 'wandb'"),
        logging(tmp_path, loggers=[{"name": "wandb"}]),
    ):
        pass


def test_a_users_logger_that_fails_is_named_with_its_line(tmp_path):
    class Broken(Logger):
        def record(self, phase, step, metrics):
            raise KeyError("loss")

    with logging(tmp_path) as (_, log):
        log.add(Broken())
        with pytest.raises(UserError, match=r"logger Broken: record raised KeyError: 'loss' \(.*test_run_log.py, line"):
            log.step(1, {})
