"""A run of episodes: killed in the middle of one it repeats it, and two ranks of an engine have one rank's numbers."""

import json
import os
import signal
import time

import pytest

from tests.e2e import runs

GUESSING = [
    *(f"~data.task_kwargs.{name}" for name in ("min_terms", "max_terms", "max_value")),
    "data={task: guessing, task_kwargs: {low: 1, high: 7, num_guesses: 3, num_val: 4}, response_key: response}",
    'model.tokenizer="char:0123456789<->higerlowWtanumb. #"',
    "model.overrides.num_hidden_layers=2",
    "train={num_steps: 4, batch_size: 4, minibatch_size: 2, eval_interval: 2, warm_start: {num_steps: 2}}",
    "actor.max_tokens_per_microbatch=512",
    "rollout={n: 4, prompt_length: 8, response_length: 32, max_num_seqs: 16}",
    "rollout.multi_turn={enable: true, max_assistant_turns: 3}",
    "rollout.agent={environment: guess, environment_kwargs: {low: 1, high: 7, max_guesses: 3}, num_workers: 1}",
    "reward.functions=[{name: environment}]",
    "checkpoint.interval=1",
]
WITHIN = 1e-6
"""Of two sums of the same numbers in fp32, over another number of ranks."""


PROBABILITY = 1e-4
"""The project's bound on what an engine and the actor say of a sampled token."""


def told(rows):
    """Metrics of the steps that do not depend on the clock."""
    return [
        {name: value for name, value in row.items() if not name.startswith(("timing", "perf")) and name[-2:] != "_s"}
        for row in rows
    ]


def samples(folder):
    return [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, told(runs.train_in_pool(folder, GUESSING, 1))


def test_a_run_tells_of_its_episodes(uninterrupted):
    folder, rows = uninterrupted
    last = rows[-1]
    assert 1 <= last["num_turns/mean"] <= last["num_turns/max"] <= 3
    assert 0 < last["episode/sampled_frac"] < 1
    assert last["reward/environment/mean"] == last["critic/score/mean"]
    assert sum(last[f"episode/{end}_frac"] for end in ("finished", "response_length", "max_assistant_turns")) == 1
    assert "val/num_turns/mean" in last
    row = samples(folder)[-1]
    assert [turn["by"] for turn in row["turns"]][:2] == ["policy", "environment"] or len(row["turns"]) == 1
    assert row["turns"][0]["text"] in row["response"]


def test_a_run_that_is_killed_in_an_episode_repeats_it(uninterrupted, tmp_path):
    whole, expected = uninterrupted
    process = runs.fork(tmp_path, GUESSING)
    file, end = tmp_path / "run" / "metrics.jsonl", time.monotonic() + runs.TIMEOUT_S
    while time.monotonic() < end and process.is_alive():
        if file.is_file() and len(file.read_text().splitlines()) >= 3:
            break
        time.sleep(0.01)
    assert process.is_alive(), (tmp_path / "output.txt").read_text()
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert told(runs.train_in_pool(tmp_path, GUESSING, 1)) == expected
    assert samples(tmp_path) == samples(whole)


def test_two_ranks_of_an_engine_have_the_episodes_of_one(uninterrupted, tmp_path):
    _, expected = uninterrupted
    two = ["rollout.tensor_model_parallel_size=2", "parallel.tensor_model_parallel_size=2", "train.num_steps=1"]
    found = told(runs.train_in_pool(tmp_path, [*GUESSING, *two], 2))
    for name in ("rollout/token_checksum", "num_turns/mean", "episode/sampled_frac", "critic/score/mean"):
        assert found[-1][name] == pytest.approx(expected[len(found) - 1][name], rel=WITHIN), name
    for rows in (found, expected):
        differs = [row["training/rollout_probs_diff_max"] for row in rows if "num_turns/mean" in row]
        assert differs and max(differs) < PROBABILITY
