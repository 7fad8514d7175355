"""Trouble while ranks sample beside those that train: it is named, the job ends, and the run goes on identically."""

import re
import time

import pytest

from tests.e2e import in_flight_kills, runs

pytestmark = [pytest.mark.timing, pytest.mark.slow]
COLLECTIVE_S = 6  # less than tests/launch/trouble.py crawls
END_S = 30
"""From the trouble to the end of the job: the timeout, and what the ranks take to ask each other and to end."""

SETTINGS = [
    *in_flight_kills.SETTINGS, "rollout.num_ranks=1", "checkpoint.interval=1", "train.num_steps=4",
    "train.eval_interval=2", f"run.collective_timeout_s={COLLECTIVE_S}", "run.heartbeat_timeout_s=10",
]  # fmt: skip
"""Two ranks train and one samples, two steps ahead."""

BESIDE = ["algorithm.name=tests.launch.trouble:Beside", "rollout.name=tests.launch.trouble:Streaming"]
REFITTING = ["rollout.name=tests.launch.trouble:Refitting"]
UPDATE = 3
"""The first one of step 2; the sampling beside it is the third one, after that of step 1 and that beside it."""

SAMPLER = r"rank 2 \(host \S+ process \d+\)"
TROUBLES = {
    "a rank that samples is slow, which is no trouble, and then hangs": (
        f"crawl 2 {UPDATE}", BESIDE, {70},
        rf"{SAMPLER} is late: ranks 0-1 have waited \d+ s in a collective\.[^!]*at step 2, gen[^!]*in make_trouble\n",
    ),
    "a rank that trains hangs": (
        f"sleep 1 {UPDATE}", BESIDE, {70},
        r"rank 1 \(host \S+ process \d+\) is late: ranks 0, 2 have waited \d+ s in a collective\."
        r"[^!]*at step 2, update_actor[^!]*in make_trouble\n",
    ),
    "a rank that samples is killed": (f"kill 2 {UPDATE}", BESIDE, {70, -9}, rf"{SAMPLER} is gone"),
    "a rank that trains is killed in its update": (
        f"kill 1 {UPDATE}", BESIDE, {70, -9}, r"rank 1 \(host \S+ process \d+\) is gone",
    ),
    "a refit fails half way": (
        "raise 2 2", REFITTING, {70},
        rf"{SAMPLER} failed at step 2, update_weights:\nTraceback[^!]*ArithmeticError: a planted error",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unhurt")
    runs.train_in_pool(folder, SETTINGS, in_flight_kills.RANKS)
    return in_flight_kills.result(folder)


@pytest.mark.parametrize("name", TROUBLES)
def test_trouble_in_an_overlapped_step_is_named_and_ends_the_job_and_the_run_goes_on_identically(
    name, unhurt, tmp_path
):
    kind, settings, expected_statuses, expected = TROUBLES[name]
    file = tmp_path / "trouble"

    def run():
        variables = {"TROUBLE": f"{kind} {file}"}
        return in_flight_kills.Job(tmp_path, [*SETTINGS, *settings], by_torchrun=False, variables=variables).wait()

    statuses = run()
    said = (tmp_path / "output.txt").read_text()
    assert file.exists(), said
    assert time.time() - file.stat().st_mtime < END_S
    assert set(statuses) == expected_statuses, said
    assert said.count("mrl: error: ") == 1, said
    assert re.search(expected, said.partition("mrl: error: ")[2]), said
    assert "is of step 1: the same command resumes from it" in said
    assert run() == [0, 0, 0], (tmp_path / "output.txt").read_text()[-3000:]
    assert in_flight_kills.result(tmp_path) == unhurt
