"""A run folder whose files were changed by hand: reading or resuming it works, or a UserError names the file."""

import json

import pytest

from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.errors import UserError
from mrl.observability.report import write_report
from mrl.observability.run_log import RunLog
from tests.observability.folders import config, logging, run_steps

START = {"resume_step": 2, "world_size": 1, "facts": {"device": "cpu"}}
NO_STEPS = [3, None, True, 1.5, "x", -1, [1]]
STEP_FILES = ("metrics.jsonl", "timings.jsonl", "samples.jsonl")
TURN = {"by": "policy", "text": "3", "reward": None}
ROW = {"step": 1, "phase": "train"}


def line(**values):
    return json.dumps(values).encode() + b"\n"


DAMAGE = [
    *((name, line(**{**ROW, "step": step})) for name in STEP_FILES for step in NO_STEPS),
    *((name, line(**{**ROW, "phase": phase})) for name in STEP_FILES for phase in (3, None, ["train"])),
    *((name, content) for name in STEP_FILES for content in (line(phase="train"), line(step=1), b"\xff\n", b"[1]\n")),
    *(("samples.jsonl", line(**ROW, turns=turns)) for turns in (3, [3], [{"by": 1}], [{**TURN, "text": 1}], "ab")),
    *(("notes.jsonl", content) for content in (b"3\n", b"\xff\n")),
    *(("run.json", json.dumps(value).encode()) for value in (3, [], {"starts": 3}, {"starts": [3]}, {"starts": {}})),
    ("run.json", json.dumps({"starts": [{"versions": 3}]}).encode()),
    ("run.json", json.dumps({"starts": [{"changes": 3}]}).encode()),
    ("run.json", b'{"starts": ['),
    ("run.json", b"\xff\xfe"),
]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    with logging(tmp_path / "run", tensorboard=True) as (run, log):
        run_steps(log, 1, 2)
    return run


def resume(run):
    settings = config(run.root, tensorboard=True)
    run.start(settings, **START)
    with RunLog(settings, run, 2) as log:
        run_steps(log, 3, 3)


CASES = [(resume, *one) for one in DAMAGE]
CASES += [(write_report, *one) for one in DAMAGE if one[0] not in STEP_FILES or b"turns" in one[1]]
CASES += [(write_report, name, line(step="x", phase="train")) for name in STEP_FILES]  # drawing a page takes a second


@pytest.mark.parametrize(("use", "name", "content"), CASES)
def test_a_damaged_file_is_refused_by_its_name_or_does_no_harm(name, content, use, run):
    before = (run.root / name).read_bytes()
    (run.root / name).write_bytes(content + before if name.endswith("l") else content)
    try:
        use(run.root if use is write_report else run)
    except UserError as error:
        assert name in str(error)


@pytest.mark.parametrize("name", [*STEP_FILES, "notes.jsonl", "run.json", "config.yaml", "tensorboard"])
def test_a_folder_in_the_place_of_a_file_is_refused_by_its_name(name, run):
    place = run.root / name
    if name == "tensorboard":
        place.rename(run.root / "old")
        place.write_bytes(b"")
    else:
        place.unlink()
        place.mkdir()
    with pytest.raises(UserError, match=name):
        resume(run)
    if name in (*STEP_FILES, "notes.jsonl"):
        with pytest.raises(UserError, match=name):
            write_report(run.root)


def test_a_report_needs_no_config_and_no_facts(run):
    run.config.unlink()
    run.run_info.unlink()
    assert write_report(run.root).read_bytes()
    assert RunDir(run.root).committed_steps() == []
