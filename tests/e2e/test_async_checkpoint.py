"""Checkpoints that are written beside the training: the same numbers, whole or not there, killed at any moment."""

import functools
import json
import os
import resource
import signal
import subprocess
import threading
import time

import pytest
import torch.distributed as dist

from mrl.checkpoint.run_dir.checkpoint import CheckpointManager
from mrl.checkpoint.run_dir.manifest import committed_steps, read_manifest
from mrl.config.config import CheckpointConfig, LoraConfig
from mrl.distributed.local_ranks import fork_server_context
from mrl.errors import UserError
from mrl.megatron import checkpoint
from tests.e2e import async_kills, runs
from tests.e2e.async_kills import ASYNC
from tests.full_disk import full_disk
from tests.megatron.actors import ARCHS, LAYOUTS, fill_adapters, full_adapters, full_weights, make_policy, train
from tests.megatron.test_checkpoint import RATE
from tests.ranks import PRELOAD, run_ranks

pytestmark = pytest.mark.slow

PARTS = [0.5, 0.97]
"""Of all moments of the run: in its second commit, and in its last."""
END_S = 120
HEARD_S = 0.5
"""From a signal to what the main thread does about it."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder and moments of a run that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, async_kills.count_moments(folder)


def hashes(folder):
    commits = folder / "run" / "checkpoints"
    return {path.name: read_manifest(path).step for path in sorted(commits.glob("step-*"))}


def test_the_numbers_are_those_of_a_run_that_waits(whole, tmp_path):
    folder, _ = whole
    waiting = [text for text in ASYNC if "async_save" not in text]
    assert runs.train_in_pool(tmp_path, waiting, 1) == runs.metrics(folder)
    assert hashes(folder) == hashes(tmp_path)
    notes = [json.loads(line)["text"] for line in (folder / "run" / "notes.jsonl").read_text().splitlines()]
    told = [note for note in notes if "written in the background in" in note and "training waited" in note]
    assert len(told) == 3  # steps 0, 2 and 4


@pytest.mark.parametrize("part", PARTS)
def test_a_run_that_is_killed_while_it_writes_goes_on_identically(part, whole, tmp_path):
    folder, count = whole
    assert async_kills.killed(tmp_path / "run", round(part * count))
    assert async_kills.goes_on(tmp_path / "run", runs.metrics(folder))


def trained_on_while_written(folder, distributed, dtype, rank):
    """Weights when the save began, and after more steps, which were done before a byte of it was written."""
    lora = LoraConfig(rank=rank, alpha=8.0) if rank else LoraConfig()
    options = {"actor": {"use_distributed_optimizer": distributed, "lora": lora}, "dtype": dtype}
    policy = make_policy(ARCHS["qwen2"], LAYOUTS["dp2"], **options)
    trained = full_adapters if rank else full_weights
    if rank:
        fill_adapters(policy)
    policy.start_optimizer(RATE)
    train(policy, 1)
    before, lock = trained(policy), threading.Lock()
    start = threading.Thread.start

    def held_back(self):
        run = self.run

        def waits():
            with lock:
                run()

        self.run = waits
        start(self)

    lock.acquire()
    threading.Thread.start = held_back
    try:
        writing = checkpoint.Saver(policy).begin(folder, async_save=True)
    finally:
        threading.Thread.start = start
    assert not writing.is_done and not list(folder.glob("*.distcp"))
    train(policy, 2, first=1)
    lock.release()
    writing.finish()
    after = trained(policy)
    again = make_policy(ARCHS["qwen2"], LAYOUTS["dp2"], **options, **({} if rank else {"seed": None}))
    again.start_optimizer(RATE)
    checkpoint.load(folder, again)
    found = trained(again)
    same = all(bool((found[name] == before[name]).all()) for name in before)
    moved = any(bool((after[name] != before[name]).any()) for name in before)
    return same, moved, again.num_updates


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize(("dtype", "rank"), [("float32", 0), ("bfloat16", 0), ("bfloat16", 4)])
def test_what_is_written_is_what_was_there_when_it_began(dtype, rank, distributed, tmp_path):
    for found in run_ranks(2, trained_on_while_written, tmp_path / "actor", distributed, dtype, rank):
        assert found == (True, True, 1)


def told_while_written(folder, number, after):
    """In a process of its own: a run that gets the signal while its first commit is written, after `after` lines."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    write_item, lock, written = filesystem_async._write_item, threading.Lock(), folder / "written"
    lines = folder / "run" / "metrics.jsonl"

    @functools.wraps(write_item)
    def held(*args, **kwargs):
        with lock:  # a thread for each of two files
            if not written.exists():
                while len(lines.read_text().splitlines()) < after:
                    time.sleep(0.01)
                os.kill(os.getpid(), number)
                time.sleep(HEARD_S)
            with written.open("a") as count:
                count.write("x")
        return write_item(*args, **kwargs)

    filesystem_async._write_item = held
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    runs._alone(str(folder), runs.arguments(folder, ASYNC), {})


@pytest.mark.parametrize(
    ("number", "steps", "status", "said", "committed"),
    [
        (signal.SIGUSR1, 0, 75, "stopped by SIGUSR1 after step 0; its checkpoint was written", [0]),
        (signal.SIGTERM, 1, 75, "stopped by SIGTERM after step 1; its checkpoint was written", [0, 1]),
        (signal.SIGINT, 1, 130, "interrupted.\nThere is no checkpoint yet", []),
    ],
    ids=["what_stands_is_written", "a_step_further", "ctrl_c"],
)
def test_a_run_that_is_told_to_end_while_it_writes_goes_on_identically(
    number, steps, status, said, committed, whole, tmp_path
):
    folder, _ = whole
    before = 1 + next(index for index, row in enumerate(runs.metrics(folder)) if row["step"] == 0)  # warm start
    process = fork_server_context(PRELOAD).Process(target=told_while_written, args=(tmp_path, number, before + steps))
    process.start()
    process.join(END_S)
    output = (tmp_path / "output.txt").read_text()
    assert process.exitcode == status and said in output and "Traceback" not in output, output
    assert committed_steps(tmp_path / "run" / "checkpoints") == committed
    if number == signal.SIGINT:
        assert len((tmp_path / "written").read_text()) < 5, "a commit that is dropped was written on"
    assert async_kills.goes_on(tmp_path, runs.metrics(folder))


def test_a_disk_that_fills_while_it_is_written_to_ends_the_run_with_the_commit_before(whole, tmp_path):
    folder, _ = whole
    commits = tmp_path / "run" / "checkpoints"
    sizes = [
        sum(file.stat().st_size for file in (folder / "run/checkpoints" / name).rglob("*"))
        for name in ("reference-00000000", "step-00000004", "step-00000004")
    ]
    with full_disk(commits, f"{(sum(sizes) - sizes[-1] // 2) // 1024}k"):
        process = runs.fork(tmp_path, ASYNC)
        process.join(END_S)
        output = (tmp_path / "output.txt").read_text()
        assert process.exitcode == 2 and output.count("mrl: error") == 1 and "Traceback" not in output, output
        assert "No space left on device" in output and "The last checkpoint is of step 0" in output
        assert committed_steps(commits) == [0] and not list(commits.glob(".writing-*"))
        subprocess.run(["mount", "-o", "remount,size=64m", str(commits)], check=True)
        assert async_kills.goes_on(tmp_path, runs.metrics(folder))


def refused_beside(folder):
    """What a rank hears of a commit of which rank 1 cannot write a file."""
    policy = make_policy(ARCHS["qwen2"], LAYOUTS["dp2"])
    policy.start_optimizer(RATE)
    saver, commits = checkpoint.Saver(policy), CheckpointManager(folder, CheckpointConfig())

    def begin(step):
        return commits.begin_save(step, lambda path: saver.begin(path / "actor", async_save=True), {"step": step})

    commits.finish_save(begin(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        unfinished = begin(2)
        train(policy, 1)
        commits.finish_save(unfinished)
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    raise AssertionError("a commit without a file")


def test_what_one_rank_cannot_write_beside_the_training_is_told_on_all(tmp_path):
    for said in run_ranks(2, refused_beside, tmp_path):
        assert "failed" in said and "File too large" in said and "last complete checkpoint" in said
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
