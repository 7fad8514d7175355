"""Commit points: whole or not there."""

import contextlib
import json
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist

from mrl.checkpoint.run_dir.checkpoint import CheckpointManager
from mrl.checkpoint.run_dir.manifest import committed_steps, read_manifest
from mrl.config.config import CheckpointConfig
from mrl.errors import UserError
from tests.ranks import run_ranks


def _save(folder, steps, keep_last=2, keep_best=0, metrics=None, fail_at=None):
    checkpoints = CheckpointManager(Path(folder), CheckpointConfig(keep_last=keep_last, keep_best=keep_best))

    def write(path):
        file = path / "actor" / f"rank{dist.get_rank()}.bin"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes([dist.get_rank()]) * 1000)
        if fail_at is not None and dist.get_rank() == fail_at:
            raise OSError(28, "No space left on device")

    for step in steps:
        checkpoints.save(step, write, {"step": step}, None if metrics is None else metrics[step])
    return [checkpoints.read(checkpoints.path(step)) for step in checkpoints.steps()]


def test_a_commit_holds_every_ranks_files_and_the_state(tmp_path):
    assert run_ranks(2, _save, str(tmp_path), [3]) == [[{"step": 3}]] * 2
    commit = read_manifest(tmp_path / "step-00000003")
    assert sorted(commit.files) == ["actor/rank0.bin", "actor/rank1.bin", "state.json"]


def test_keep_last_and_keep_best_choose_what_stays(tmp_path):
    run_ranks(2, _save, str(tmp_path), [1, 2, 3, 4, 5], 2, 1, {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.2, 5: 0.3})
    assert committed_steps(tmp_path) == [2, 4, 5]


def test_a_failed_save_leaves_the_earlier_commit_and_names_the_cause_on_all_ranks(tmp_path):
    run_ranks(2, _save, str(tmp_path), [1])
    for message in run_ranks(2, _message, str(tmp_path), fail_at=1):
        assert "No space left" in message and "last complete checkpoint" in message
    assert committed_steps(tmp_path) == [1]
    run_ranks(2, _save, str(tmp_path), [2])
    assert not list(tmp_path.glob(".writing-*"))


def _message(folder, **settings):
    try:
        _save(folder, [2], **settings)
    except UserError as error:
        return str(error)


def _read(folder, step):
    try:
        return CheckpointManager(Path(folder), CheckpointConfig()).read(Path(folder) / f"step-{step:08d}")
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("damage", ["change", "remove"])
def test_damage_is_noticed_and_named(tmp_path, damage):
    run_ranks(2, _save, str(tmp_path), [7])
    file = tmp_path / "step-00000007" / "actor" / "rank1.bin"
    file.write_bytes(b"x" * 1000) if damage == "change" else file.unlink()
    for message in run_ranks(2, _read, str(tmp_path), 7):
        assert "actor/rank1.bin" in message and "Remove that folder" in message


def test_a_folder_without_commit_is_no_checkpoint(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    assert committed_steps(tmp_path) == []
    with pytest.raises(UserError, match="not a checkpoint"):
        read_manifest(tmp_path / "step-00000001")


def _newest(folder):
    try:
        found = CheckpointManager(Path(folder), CheckpointConfig()).find_latest(repair=True)
    except UserError as error:
        return str(error)
    return found and (found.step, found.notes)


FILE = {"bytes": 1, "sha256": "0" * 64}
RECORD = {"format": 1, "step": 7, "metric": None, "files": {"state.json": FILE}}
NO_RECORDS = {
    "empty": b"",
    "half": b'{"format": 1, "st',
    "nothing": b"null",
    "list": b"[]",
    "text": b'"commit"',
    "no UTF-8": b'{"\xff": 1}',
    "deep": b"[" * 100_000,
    "long number": b'{"format": ' + b"1" * 10_000 + b"}",
    "empty object": b"{}",
    **{
        name: json.dumps(RECORD | change).encode()
        for name, change in {
            "no files": {"files": {}},
            "files in a list": {"files": ["state.json"]},
            "no state": {"files": {"actor": FILE}},
            "another step": {"step": 8},
            "no step": {"step": None},
            "a truth for a format": {"format": True},
            "no format": {"format": None},
            "a metric in words": {"metric": "good"},
            "no facts": {"files": {"state.json": None}},
            "no hash": {"files": {"state.json": {"bytes": 1}}},
            "a hash of something": {"files": {"state.json": {"bytes": 1, "sha256": "x" * 64}}},
            "no size": {"files": {"state.json": FILE | {"bytes": -1}}},
            "elsewhere": {"files": {"state.json": FILE, "../step-00000003/state.json": FILE}},
            "absolute": {"files": {"state.json": FILE, "/etc/passwd": FILE}},
            "itself": {"files": {"state.json": FILE, ".": FILE}},
            "no text": {"files": {"state.json": FILE, "\ud800": FILE}},
            "too long": {"files": {"state.json": FILE, "x" * 5000: FILE}},
        }.items()
    },
}


@pytest.mark.parametrize("name", NO_RECORDS)
def test_a_record_of_no_whole_commit_is_told_and_the_older_one_is_taken(tmp_path, name):
    run_ranks(2, _save, str(tmp_path), [3, 7])
    (tmp_path / "step-00000007" / "commit.json").write_bytes(NO_RECORDS[name])
    (step, notes), again = run_ranks(2, _newest, str(tmp_path))
    assert step == 3 and again == (step, notes)
    assert notes[0].startswith(f"{tmp_path}/step-00000007 is damaged: '")
    assert notes[0].endswith("the run resumes from step-00000003")
    shutil.rmtree(tmp_path / "step-00000003")
    message = run_ranks(2, _newest, str(tmp_path))[1]
    assert "has no intact checkpoint: step-00000007: " in message and "remove it to start from the beginning" in message


def test_a_file_that_was_changed_in_place_is_passed_over_and_an_empty_folder_is_none(tmp_path):
    run_ranks(2, _save, str(tmp_path), [3, 7])
    (tmp_path / "step-00000007" / "actor" / "rank1.bin").write_bytes(b"x" * 1000)
    (tmp_path / "step-00000009").mkdir()
    ((step, notes), _) = run_ranks(2, _newest, str(tmp_path))
    assert step == 3 and "'actor/rank1.bin' has changed" in notes[0] and len(notes) == 1
    run_ranks(2, _save, str(tmp_path), [7])
    assert run_ranks(2, _newest, str(tmp_path)) == [(7, [])] * 2


@pytest.mark.parametrize("name", ["step-7", "step-007", "step-", "step-\u0661", "step-1\u00b2", "step-+0000007"])
def test_a_name_that_no_commit_has_is_no_commit(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "commit.json").write_text(json.dumps(RECORD))
    assert committed_steps(tmp_path) == []


def test_a_commit_of_another_format_is_refused_and_not_passed_over(tmp_path):
    run_ranks(2, _save, str(tmp_path), [3, 7])
    (tmp_path / "step-00000007" / "commit.json").write_text(json.dumps({"format": 99}))
    assert "format 99" in run_ranks(2, _newest, str(tmp_path))[1]


@contextlib.contextmanager
def _fixed(folder):
    """A folder that cannot be removed, under whatever name: something is mounted on it, or it may not be written."""
    if os.getuid() == 0:
        mount = ["mount", "--bind", str(folder), str(folder)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount")
    else:
        (folder / "file").touch()
        folder.chmod(0o555)
    inode = folder.stat().st_ino
    try:
        yield
    finally:
        for path in folder.parents[1].rglob("*"):
            if path.is_dir() and path.stat().st_ino == inode:
                subprocess.run(["umount", path] if os.getuid() == 0 else ["chmod", "755", path], check=True)


def _save_and_tell(folder, steps):
    told = []
    checkpoints = CheckpointManager(Path(folder), CheckpointConfig(keep_last=1), told.append)
    for step in steps:
        checkpoints.save(step, lambda path: (path / "actor").mkdir(exist_ok=True), {"step": step})
    return told


@pytest.mark.parametrize("which", ["actor", ""], ids=["a part of it", "the folder itself"])
def test_an_old_commit_that_cannot_be_removed_is_told_once_and_the_run_goes_on(tmp_path, which):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    run_ranks(2, _save_and_tell, str(folder), [1])
    if not which and os.getuid() != 0:
        pytest.skip("its mode does not keep a folder from being renamed")
    with _fixed(folder / "step-00000001" / which):
        told, silent = run_ranks(2, _save_and_tell, str(folder), [2, 3])
        assert len(told) == 1 and "cannot be removed" in told[0] and silent == []
        assert committed_steps(folder) == ([3] if which else [1, 3])
    run_ranks(2, _save_and_tell, str(folder), [4])
    assert [path.name for path in folder.iterdir()] == ["step-00000004"]


def _save_with_small_files(folder):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        return _message(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_one_rank_cannot_write_is_told_on_all_and_leaves_nothing(tmp_path):
    run_ranks(2, _save, str(tmp_path), [1])
    for message in run_ranks(2, _save_with_small_files, str(tmp_path)):
        assert "File too large" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
