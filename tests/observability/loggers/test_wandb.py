"""Weights & Biases, the real package, offline: what it wrote is read back from its files."""

import json
import sys
from dataclasses import replace

import pytest
import wandb

from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.commands.cli import main
from mrl.errors import UserError
from mrl.observability.loggers.wandb import check
from mrl.observability.run_log import RunLog
from tests.e2e import runs
from tests.observability.folders import config, logging, metrics_of, row, run_steps
from tests.observability.loggers.wandb_file import history, records, summary


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for place in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(place, str(tmp_path / "wandb-home"))


def by_step(run, axis):
    """{step: all values logged for it}"""
    found = {}
    for call in history(run):
        if axis in call:
            found.setdefault(call[axis], {}).update(call)
    return found


@pytest.mark.slow
def test_a_run_and_its_resume_are_one_run_there_with_every_value_of_the_files(tmp_path):
    settings = [
        "observe.console=off",
        "observe.wandb_project=sums",
        "train.num_steps=1",
        "train.warm_start.num_steps=2",
    ]
    assert main(runs.arguments(tmp_path, settings)) == 0
    assert main(runs.arguments(tmp_path, [*settings, "train.num_steps=2"])) == 0
    first, second = records(tmp_path / "run")
    ids = {record.run.run_id for run in (first, second) for record in run if record.HasField("run")}
    assert ids == {(tmp_path / "run" / "wandb_id").read_text()}
    assert {record.run.project for record in first if record.HasField("run")} == {"sums"}

    steps = {**by_step(first, "training/global_step"), **by_step(second, "training/global_step")}
    warm = by_step(first, "warm_start/step")
    assert list(steps) == [0, 1, 2] and list(warm) == [1, 2]
    assert list(by_step(second, "training/global_step")) == [2]  # nothing is logged twice
    for file in ("metrics.jsonl", "timings.jsonl"):
        for line in (tmp_path / "run" / file).read_text().splitlines():
            wanted = json.loads(line)
            found = (warm if wanted.pop("phase") == "warm_start" else steps)[wanted.pop("step")]
            assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=0, abs=0, nan_ok=True)
    assert "val-core/addition/reward/mean@1" in steps[2]
    assert any("samples/val/path" in call for call in history(second))


def test_its_axes_are_the_steps_of_mrl(tmp_path):
    with logging(tmp_path, wandb_project="p") as (run, log):
        run_steps(log, 1, 1)
    (found,) = records(run.root)
    axes = {record.metric.glob_name: record.metric.step_metric for record in found if record.HasField("metric")}
    assert axes["*"] == "training/global_step" and axes["warm_start/*"] == "warm_start/step"


def test_the_summary_has_the_last_values_and_the_config(tmp_path):
    with logging(tmp_path, wandb_project="p", num_steps=3, actor={"lr": 0.25}) as (run, log):
        run_steps(log, 1, 3)
    (found,) = records(run.root)
    assert summary(found).items() >= (metrics_of(3) | {"val/accuracy": 3 / 8}).items()
    config = {item.key: json.loads(item.value_json) for record in found for item in record.run.config.update}
    assert config["actor"]["lr"] == 0.25 and config["train"]["num_steps"] == 3


def named(root, **fields):
    made = config(root, wandb_project=fields.pop("wandb_project", None))
    return replace(made, observe=replace(made.observe, **fields))


def test_name_group_and_tags_are_those_of_the_config(tmp_path):
    fields = {"wandb_name": "seed 3", "wandb_group": "sums", "wandb_tags": ["short", "cpu"]}
    for part, given in (("plain", {}), ("named", fields)):
        made = named(tmp_path / part, wandb_project="p", **given)
        run = RunDir(tmp_path / part)
        run.start(made, resume_step=None, world_size=1, facts={"device": "cpu"})
        with RunLog(made, run, None):
            pass
        (found,) = records(run.root)
        header = next(record.run for record in found if record.HasField("run"))
        seen = (header.display_name, header.run_group, sorted(header.tags))
        assert seen == (("seed 3", "sums", ["cpu", "short"]) if given else ("plain", "", []))


@pytest.mark.parametrize("field", ["wandb_name", "wandb_group"])
def test_a_name_without_a_project_is_refused(field, tmp_path):
    with pytest.raises(UserError, match=rf"observe\.{field} is set, but observe\.wandb_project"):
        check(named(tmp_path, **{field: "x"}))


@pytest.mark.parametrize("resume_step", [None, 2])
def test_only_a_resume_with_its_marker_goes_on_under_the_same_id(tmp_path, resume_step):
    ids = []
    for start in (None, resume_step):
        with logging(tmp_path, wandb_project="p", resume_step=start) as (run, log):
            log.samples(1, [row(answer=None)])
        ids.append((run.root / "wandb_id").read_text())
        if start is not None:
            (run.root / "wandb_id").unlink()
    assert (ids[0] == ids[1]) == (resume_step is not None)
    with logging(tmp_path, wandb_project="p", resume_step=2):
        assert (run.root / "wandb_id").read_text() not in ids[:1] or resume_step is None


def test_a_start_that_wandb_refuses_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.teardown()  # it read the environment of the tests before
    with pytest.raises(UserError, match=r"W&B did not start.*WANDB_MODE=offline"), logging(tmp_path, wandb_project="p"):
        pass
    wandb.teardown()


def test_without_its_package_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"), logging(tmp_path, wandb_project="p"):
        pass
