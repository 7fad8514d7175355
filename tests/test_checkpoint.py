"""Commit points: whole or not there."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from mrl.checkpoint import Checkpoints, read_commit
from mrl.config import CheckpointConfig
from mrl.errors import UserError
from mrl.observe.run_dir import committed_steps
from tests.ranks import run_ranks


def _save(folder, steps, keep_last=2, keep_best=0, metrics=None, fail_at=None):
    checkpoints = Checkpoints(Path(folder), CheckpointConfig(keep_last=keep_last, keep_best=keep_best))

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
    commit = read_commit(tmp_path / "step-00000003")
    assert sorted(commit["files"]) == ["actor/rank0.bin", "actor/rank1.bin", "state.json"]


def test_keep_last_and_keep_best_choose_what_stays(tmp_path):
    run_ranks(2, _save, str(tmp_path), [1, 2, 3, 4, 5], 2, 1, {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.2, 5: 0.3})
    assert committed_steps(tmp_path) == [2, 4, 5]


def test_a_failed_save_leaves_the_earlier_commit_and_names_the_cause_on_all_ranks(tmp_path):
    run_ranks(2, _save, str(tmp_path), [1])
    for message in run_ranks(2, _message, str(tmp_path)):
        assert "No space left" in message and "last whole checkpoint" in message
    assert committed_steps(tmp_path) == [1]
    run_ranks(2, _save, str(tmp_path), [2])
    assert not list(tmp_path.glob(".writing-*"))


def _message(folder):
    try:
        _save(folder, [2], fail_at=1)
    except UserError as error:
        return str(error)


def _read(folder, step):
    try:
        return Checkpoints(Path(folder), CheckpointConfig()).read(Path(folder) / f"step-{step:08d}")
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
        read_commit(tmp_path / "step-00000001")


def test_a_commit_of_another_format_is_refused(tmp_path):
    (tmp_path / "commit.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="format 99"):
        read_commit(tmp_path)
