"""Checkpoints that are written beside the training: the same numbers, whole or not there, killed at any moment."""

import json
import threading

import pytest

from mrl.megatron import checkpoint
from mrl.run_folder.commit import read_commit
from tests.e2e import async_kills, runs
from tests.e2e.async_kills import ASYNC
from tests.megatron.actors import ARCHS, LAYOUTS, full_weights, make_policy, train
from tests.megatron.test_checkpoint import RATE
from tests.ranks import run_ranks

PARTS = [0.5, 0.97]
"""Of all moments of the run: in its second commit, and in its last."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder and moments of a run that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, async_kills.count_moments(folder)


def hashes(folder):
    commits = folder / "run" / "checkpoints"
    return {path.name: read_commit(path).step for path in sorted(commits.glob("step-*"))}


def test_the_numbers_are_those_of_a_run_that_waits(whole, tmp_path):
    folder, _ = whole
    waiting = [text for text in ASYNC if "async_save" not in text]
    assert runs.train_in_pool(tmp_path, waiting, 1) == runs.metrics(folder)
    assert hashes(folder) == hashes(tmp_path)
    notes = [json.loads(line)["text"] for line in (folder / "run" / "notes.jsonl").read_text().splitlines()]
    told = [note for note in notes if "written beside the training in" in note and "which waited" in note]
    assert len(told) == 3  # steps 0, 2 and 4


@pytest.mark.parametrize("part", PARTS)
def test_a_run_that_is_killed_while_it_writes_goes_on_identically(part, whole, tmp_path):
    folder, count = whole
    assert async_kills.killed(tmp_path / "run", round(part * count))
    assert async_kills.goes_on(tmp_path / "run", runs.metrics(folder))


def trained_on_while_written(folder, distributed):
    """Weights when the save began, and after more steps, which were done before a byte of it was written."""
    policy = make_policy(ARCHS["qwen2"], LAYOUTS["dp2"], actor={"use_distributed_optimizer": distributed})
    policy.start_optimizer(RATE)
    train(policy, 1)
    before, lock = full_weights(policy), threading.Lock()
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
        writing = checkpoint.Saver(policy).begin(folder, beside=True)
    finally:
        threading.Thread.start = start
    assert not writing.is_done and not list(folder.glob("*.distcp"))
    train(policy, 2, first=1)
    lock.release()
    writing.finish()
    after = full_weights(policy)
    again = make_policy(ARCHS["qwen2"], LAYOUTS["dp2"], seed=None, actor={"use_distributed_optimizer": distributed})
    again.start_optimizer(RATE)
    checkpoint.load(folder, again)
    found = full_weights(again)
    same = all(bool((found[name] == before[name]).all()) for name in before)
    moved = any(bool((after[name] != before[name]).any()) for name in before)
    return same, moved, again.num_updates


@pytest.mark.parametrize("distributed", [True, False])
def test_what_is_written_is_what_was_there_when_it_began(distributed, tmp_path):
    for found in run_ranks(2, trained_on_while_written, tmp_path / "actor", distributed):
        assert found == (True, True, 1)
