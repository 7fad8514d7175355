"""A full disk under each file of a run folder: the file is named, what to do is said, and no earlier line is lost."""

import pytest
from torch.utils.tensorboard.summary import scalar

from mrl.checkpoint.io.atomic_files import replace_file
from mrl.checkpoint.io.jsonl_log import StepFile, read_rows
from mrl.checkpoint.run_dir.run_lock import LockFiles, current_owner
from mrl.errors import UserError, disk_errors
from mrl.observability.loggers.tensorboard import EventFile
from mrl.observability.report import write_report
from tests.full_disk import full_disk
from tests.observability.folders import config, logging, metrics_of, row, run_steps


@pytest.fixture
def disk(tmp_path):
    with full_disk(tmp_path / "disk", "512k") as fill:
        yield tmp_path / "disk", fill


MANY = {f"actor/metric_{number}": 0.1 + number for number in range(400)}
"""More than the rest of the last block of a file takes."""

WRITES = {
    "metrics.jsonl": lambda log, run: log.step(3, MANY),
    "metrics.jsonl, the same line again": lambda log, run: log.evaluation(2, {f"val/{name}": 1.0 for name in MANY}),
    "timings.jsonl": lambda log, run: log.step(3, {f"timing_s/{name}": 1.0 for name in MANY}),
    "samples.jsonl": lambda log, run: log.samples(3, [row(response="x" * 8192)]),
    "notes.jsonl": lambda log, run: log.note("x" * 8192),
    "report.html": lambda log, run: write_report(run.root),
    "config.yaml": lambda log, run: run.start(
        config(run.root), resume_step=None, world_size=1, facts={"device": "cpu"}
    ),
}


def files_of(run):
    return {
        path: read_rows(path, by_step=path != run.notes) for path in (run.metrics, run.timings, run.samples, run.notes)
    }


@pytest.mark.parametrize("name", WRITES)
def test_it_is_told_by_name_and_nothing_is_torn(disk, name):
    folder, fill = disk
    with logging(folder / "run") as (run, log):
        run_steps(log, 1, 2)
        log.note("so far")
        before = files_of(run)
        fullness = fill()
        with pytest.raises(UserError, match="No space left on device") as told, disk_errors():
            for _ in range(50):
                WRITES[name](log, run)
        if name != "report.html":
            assert name.partition(",")[0] in str(told.value) and "the same command again" in str(told.value)
        assert files_of(run) == before
        fullness.unlink()
        log.step(3, metrics_of(3))
        log.note("goes on")
    assert [line["step"] for line in read_rows(run.metrics)] == [1, 2, 3]
    assert not list(run.root.glob(".*"))


def test_tensorboard_tells_it_in_the_loop_and_not_in_a_thread(disk, capfd):
    folder, fill = disk
    file = EventFile(folder / "train", purge_step=0)
    fill()
    with pytest.raises(OSError, match="No space left on device: .*events.out.tfevents"):
        for step in range(1000):
            file.add(step, [scalar("a", 1.0)])
    file.close()
    assert capfd.readouterr() == ("", "")


def test_a_line_that_grows_keeps_what_it_was(disk):
    folder, fill = disk
    file = StepFile(folder / "metrics.jsonl")
    file.put("train", 1, {"a": 1.0})
    fill()
    with pytest.raises(OSError, match="No space"):
        file.put("train", 1, MANY)
    assert read_rows(folder / "metrics.jsonl") == [{"step": 1, "phase": "train", "a": 1.0}]
    file.put("train", 1, {"b": 2.0})  # its block has room
    assert read_rows(folder / "metrics.jsonl") == [{"step": 1, "phase": "train", "a": 1.0, "b": 2.0}]


def test_a_folder_on_a_full_disk_is_freed_and_not_taken(disk):
    folder, fill = disk
    claims = LockFiles(folder / "owner")
    assert claims.acquire(1, current_owner(1, 1.0)) == 1
    fill()
    claims.free(1)
    assert claims.last().is_free
    with pytest.raises(UserError, match="cannot be locked: .*No space left"):
        claims.acquire(2, current_owner(1, 1.0))
    assert claims.last().number == 1 and len(list(claims.folder.iterdir())) == 1


def test_a_file_that_is_replaced_leaves_nothing_of_itself(disk):
    folder, fill = disk
    replace_file(folder / "a", b"old")
    fill()
    with pytest.raises(OSError, match="No space"):
        replace_file(folder / "a", bytes(8192))
    assert (folder / "a").read_bytes() == b"old"
    assert sorted(path.name for path in folder.iterdir()) == ["a", "everything-else"]
