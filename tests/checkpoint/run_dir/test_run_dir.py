"""The run folder says what it is, and refuses what it is not."""

import json

import pytest

from mrl.checkpoint.run_dir.run_dir import RunDir, read_run_info
from mrl.config import config as config_module
from mrl.errors import UserError
from tests.data.test_hub_files import cache, fill  # noqa: F401
from tests.observability.folders import config

START = {"world_size": 2, "facts": {"device": "cpu"}}


def test_a_started_folder_describes_itself(tmp_path):
    run = RunDir(tmp_path / "a" / "b")
    made = config(run.root, data={"task": "addition"})
    assert run.start(made, resume_step=None, **START) == []
    assert config_module.load(run.config) == made
    (start,) = read_run_info(run)["starts"]
    assert (start["world_size"], start["device"], start["resume_step"]) == (2, "cpu", None)
    assert {"mrl", "python", "torch", "megatron-core"} <= set(start["versions"])
    assert run.checkpoints.is_dir()
    assert not list(run.root.glob(".*"))


def test_resumed_starts_are_added_and_a_new_run_replaces_them(tmp_path):
    run = RunDir(tmp_path)
    for resume_step in (None, 3, 5):
        run.start(config(tmp_path), resume_step=resume_step, **START)
    assert [start["resume_step"] for start in json.loads(run.run_info.read_bytes())["starts"]] == [None, 3, 5]
    run.start(config(tmp_path), resume_step=None, **START)
    assert len(read_run_info(run)["starts"]) == 1


def test_a_folder_of_another_run_is_refused_with_the_keys_that_differ(tmp_path):
    run = RunDir(tmp_path)
    run.start(config(tmp_path, model={"preset": "small"}), resume_step=None, **START)
    other = config(tmp_path, model={"preset": "large"}, actor={"lr": 1.0})
    with pytest.raises(UserError, match=r"another config: model\.preset: small -> large\. Put these keys back"):
        run.start(other, resume_step=4, **START)
    assert config_module.load(run.config).model.preset == "small"


def test_changes_that_a_resume_may_make_are_told_where_they_change_the_numbers(tmp_path):
    run = RunDir(tmp_path)
    run.start(config(tmp_path), resume_step=None, **START)
    changed = config(
        tmp_path, console="plain", actor={"lr": 0.5}, parallel={"tensor_model_parallel_size": 2},
        data={"val_files": ["held_out.jsonl"]},
    )  # fmt: skip
    assert run.start(changed, resume_step=4, **START) == ["actor.lr: 1e-06 -> 0.5"]


def test_a_run_that_recorded_paths_of_the_hub_goes_on_under_the_name_on_the_hub(tmp_path, cache):  # noqa: F811
    folder = fill(cache, "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test.jsonl")
    paths = [str(folder / f"train-0000{part}-of-00002.jsonl") for part in range(2)]
    run = RunDir(tmp_path / "run")
    run.start(config(run.root, data={"train_files": paths}), resume_step=None, **START)
    named = config(run.root, data={"train_files": ["acme/sums"], "val_files": ["acme/sums"]})
    for _ in range(2):
        assert run.start(named, resume_step=1, **START) == []
    assert config_module.load(run.config).data.train_files == ["acme/sums"]
    with pytest.raises(UserError, match=r"data\.train_files"):
        run.start(config(run.root, data={"train_files": paths[:1]}), resume_step=1, **START)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    path = tmp_path / "taken"
    path.write_text("x")
    with pytest.raises(UserError, match="which is a file"):
        RunDir(path).start(config(path), resume_step=None, **START)
    with pytest.raises(UserError, match="below., but .*taken. is a file"):
        RunDir(path / "below").start(config(path), resume_step=None, **START)


def test_a_folder_that_could_not_be_made_is_told_before_it_is_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run.output_dir is '.*deep', but '.*file' is a file"):
        RunDir(tmp_path / "file" / "deep").check_writable()
    RunDir(tmp_path / "new" / "deep").check_writable()
    assert not (tmp_path / "new").exists()
