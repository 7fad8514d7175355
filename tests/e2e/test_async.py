"""Sampling beside the updates: the same run whatever anything takes, and with 0 steps ahead the run of sync."""

import contextlib
import io
import json
import os
import random
import time

import pytest

from tests.e2e import in_flight_kills, runs
from tests.e2e.test_roles import logged, without_refits
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

OWN = "rollout.num_ranks"
STEPS = ["train.num_steps=4", "train.eval_interval=2", "checkpoint.interval=2"]
WORST, SPANS = (f"training/off_policy/trajectory_{name}/max" for name in ("staleness_worst", "spans"))
AT_ONCE = "rollout/accepted_at_once/quarter_4"
TP, ROLLOUT_TP = "parallel.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2"
LONGER = ["train.num_steps=6", "rollout.response_length=12", "rollout.max_num_seqs=6"]
OVER = ["rollout.over_sample_rate=0.5"]


def ahead(steps):
    return ["train.mode=async", f"train.max_off_policy_steps={steps}"]


LAYOUTS = {"one rank": (1, []), "dp 2": (2, []), "two that train, one that samples": (3, [f"{OWN}=1"])}


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_step_ahead_is_the_run_of_sync_byte_for_byte(name, tmp_path):
    ranks, settings = LAYOUTS[name]
    runs.train_in_pool(tmp_path / "sync", [*STEPS, *settings], ranks)
    runs.train_in_pool(tmp_path / "async", [*STEPS, *settings, *ahead(0)], ranks)
    for file in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "async/run" / file).read_bytes() == (tmp_path / "sync/run" / file).read_bytes()


SETTINGS = {
    "one step": ahead(1),
    "two steps": ahead(2),
    "four steps, groups dropped": [*ahead(4), "algorithm.dynamic_sampling=true"],
    "more than a batch": OVER,
    "more than a batch, waited for": [*OVER, "train.max_off_policy_steps=1"],
    "more than a batch, begun again": [*OVER, "rollout.over_age=drop", "train.max_off_policy_steps=0"],
    "more than two batches, old tokens masked": ["rollout.over_sample_rate=2", "rollout.mask_offpolicy=true"],
    "more than a batch, truncated": [*OVER, "rollout.top_p=0.8"],
}
BOUNDS = {"one step": 1, "two steps": 2, "four steps, groups dropped": 4}
BOUNDS |= {"more than a batch, waited for": 1, "more than a batch, begun again": 0}
DISTURBED = ("one step", "two steps", "four steps, groups dropped", "more than a batch")
"""Those that run disturbed, twice; the others on one rank and on two."""

WHOLE = ("one step", "more than a batch, begun again")
"""Where no response is sampled by two versions."""


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in DISTURBED])
def test_ranks_of_their_own_give_the_run_of_ranks_that_do_both(name, tmp_path):
    settings = [*STEPS, *LONGER, *SETTINGS[name]]
    runs.train_in_pool(tmp_path / "both", settings, 1)
    runs.train_in_pool(tmp_path / "own", [*settings, f"{OWN}=1"], 2)
    (lines, _), (own_lines, _) = without_refits(tmp_path / "both"), without_refits(tmp_path / "own")
    assert lines == own_lines
    assert logged(tmp_path / "both", "samples.jsonl") == logged(tmp_path / "own", "samples.jsonl")
    check_ages(name, lines, 6)


def check_ages(name, lines, num_steps):
    steps = [row for row in map(json.loads, lines) if WORST in row]
    assert len(steps) == num_steps
    worst = max(row[WORST] for row in steps)
    assert worst <= BOUNDS.get(name, worst)
    assert worst > 0 or BOUNDS[name] == 0
    assert (max(row[SPANS] for row in steps) > 1) == (name not in WHOLE)
    assert all("training/rollout_probs_diff_mean" in row for row in steps)
    counts = [row["rollout/num_accepted_samples"] for row in steps if AT_ONCE in row]
    assert counts == ([32 * number for number in range(1, num_steps + 1)] if name.startswith("more than") else [])


NUM_SLEEPS = 200


def _disturbed(words, ports, seed):
    """`mrl WORDS` on this rank, which sleeps now and then where phases begin and where the replicas ask for work."""
    from mrl.observability.timers import Timers
    from mrl.rollout.prompt_queue import PromptQueue

    draw, slept, kept = random.Random(f"{seed} {os.environ['RANK']}"), [0], (Timers.phase, PromptQueue.poll)

    def late(call):
        def called(*args, **kwargs):
            if draw.random() < 0.7:
                slept[0] += 1
                time.sleep(draw.random() ** 3 * 0.04)
            return call(*args, **kwargs)

        return called

    Timers.phase, PromptQueue.poll = map(late, kept)
    try:
        return runs.in_rank(words, ports), slept[0]
    finally:
        Timers.phase, PromptQueue.poll = kept


@pytest.mark.parametrize("name", DISTURBED)
def test_random_sleeps_on_random_ranks_change_no_byte(name, tmp_path):
    settings = [*LONGER, "train.num_steps=10", "train.eval_interval=5", *SETTINGS[name], f"{OWN}=1"]
    found, num_slept = [], 0
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        ports = [runs.free_port(), runs.free_port()]
        told = run_ranks(3, _disturbed, runs.arguments(folder, settings), ports, seed)
        assert [status for status, _ in told] == [0, 0, 0]
        num_slept += sum(slept for _, slept in told)
        found.append([(folder / "run" / file).read_bytes() for file in ("metrics.jsonl", "samples.jsonl")])
    assert found[0] == found[1]
    assert num_slept >= NUM_SLEEPS
    check_ages(name, found[0][0].decode().splitlines(), 10)


MIXED = {
    "ahead, tp 2, a replica of two": (4, [*ahead(2), TP, f"{OWN}=2", ROLLOUT_TP]),
    "over, one that trains, two replicas": (3, [*OVER, f"{OWN}=2"]),
    "ahead, pp 2, one replica": (3, [*ahead(2), "parallel.pipeline_model_parallel_size=2", f"{OWN}=1"]),
}


@pytest.mark.parametrize("name", MIXED)
def test_other_layouts_are_as_repeatable(name, tmp_path):
    ranks, settings = MIXED[name]
    for folder in ("one", "other"):
        runs.train_in_pool(tmp_path / folder, [*STEPS, *LONGER, *settings], ranks)
    assert logged(tmp_path / "one", "metrics.jsonl") == logged(tmp_path / "other", "metrics.jsonl")


@pytest.mark.parametrize("name", ["two steps", "more than a batch, waited for"])
def test_a_run_that_is_killed_with_samples_in_flight_goes_on_identically(name, tmp_path):
    settings = [*LONGER, *SETTINGS[name]]
    found = in_flight_kills.compare(settings, tmp_path, kills=2, seed=len(name), by_torchrun=False)
    assert found["holds"], found


STOPPED_S = 5
"""Is left to a run that is told to stop: sampling alone would take twice as long."""
TOLD = 3
"""The first sampling beside updates, after an evaluation and what is sampled before any update."""


def _told(words, ports, file):
    os.environ["TROUBLE"] = f"slow 2 {TOLD} {file}"
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        return runs.in_rank(words, ports), said.getvalue()


@pytest.mark.parametrize(("lead", "step"), [(1, 2), (2, 1)])
def test_a_stop_waits_no_longer_for_sampling_than_there_is_time_and_what_is_there_is_kept(lead, step, tmp_path):
    settings = [
        *LONGER, *ahead(lead), "train.num_steps=4", "rollout.max_num_seqs=4", f"run.stop_timeout_s={STOPPED_S}",
        "checkpoint.interval=0", "rollout.name=tests.launch.trouble:Slow", f"{OWN}=1",
    ]  # fmt: skip
    words = runs.arguments(tmp_path, settings)
    stopped = run_ranks(3, _told, words, [runs.free_port(), runs.free_port()], str(tmp_path / "told"))
    assert [status for status, _ in stopped] == [75, 75, 75]
    assert f"mrl: stopped by SIGUSR1 after step {step}; its checkpoint was written." in stopped[0][1]
    on = run_ranks(3, _told, words, [runs.free_port(), runs.free_port()], str(tmp_path / "told"))
    assert [status for status, _ in on] == [0, 0, 0]
    ages = [row[WORST] for row in runs.metrics(tmp_path) if WORST in row]
    assert len(ages) == 4 and max(ages) <= lead
    samples = [row["rollout/num_accepted_samples"] for row in runs.metrics(tmp_path) if AT_ONCE in row]
    assert samples == sorted(samples)


def test_a_run_goes_on_with_another_number_of_replicas(tmp_path):
    settings = [*LONGER, "checkpoint.interval=1", *OVER]
    for number, replicas in enumerate((2, 1, 3), 1):
        runs.train_in_pool(tmp_path, [*settings, f"train.num_steps={2 * number}", f"{OWN}={replicas}"], 1 + replicas)
    steps = [row for row in runs.metrics(tmp_path) if AT_ONCE in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [row["rollout/num_accepted_samples"] for row in steps] == [32.0 * row["step"] for row in steps]


def test_prompts_in_flight_begin_again_where_another_bound_is_set(tmp_path):
    for number, settings in enumerate((ahead(4), [], OVER, ahead(1)), 1):
        runs.train_in_pool(tmp_path, [*LONGER, f"train.num_steps={2 * number}", *settings], 1)
    positions = [row["training/epoch"] for row in runs.metrics(tmp_path) if "training/epoch" in row]
    assert len(positions) == 8 and positions == sorted(positions)
