"""A run of episodes: killed in the middle of one it repeats it, and two ranks of an engine have one rank's numbers."""

import json
from pathlib import Path

import pytest

from tests.e2e import episode_kills, runs
from tests.ranks import SERVER

pytestmark = pytest.mark.slow

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
ECHO = f"{Path(__file__).parents[1]}/rollout/episodes/worlds.py:Echo"
WORK = ("prefill_tokens", "reread_tokens", "decode_steps", "decode_tokens", "max_running")
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
    assert sum(turn["tokens"] for turn in row["turns"]) == row["response_length"]
    assert sum(turn["reward"] for turn in row["turns"] if turn["by"] == "policy") == row["reward"]


@pytest.mark.parametrize(("task", "ranks", "kills"), [("guessing", 1, 2), ("guessing", 2, 1)])
def test_a_run_that_is_killed_in_episodes_repeats_them_and_scores_nothing_twice(task, ranks, kills, tmp_path):
    found = episode_kills.compare(task, tmp_path, kills=kills, ranks=ranks, seed=ranks)
    assert found["holds"], found
    assert found["turns_of_an_episode"] > 1 and found["scores_computed"][0] > 20


def test_turns_are_credited_over_ranks_as_on_one(tmp_path):
    """Whichever rank trains on an episode."""
    settings = [*GUESSING, "algorithm.credit=turn", "train.num_steps=1", "train.eval_interval=0"]
    one, two = (told(runs.train_in_pool(tmp_path / str(ranks), settings, ranks))[-1] for ranks in (1, 2))
    for key in ("critic/advantages/max", "actor/pg_loss", "actor/grad_norm", "rollout/token_checksum"):
        assert two[key] == pytest.approx(one[key], rel=PROBABILITY, abs=WITHIN), key
    assert one["critic/advantages/max"] > 0


def test_how_long_environments_take_changes_no_number(tmp_path):
    """More conversations than rows, and of eight turns: who samples beside whom does not follow the clock."""
    echo = [
        *(line for line in GUESSING if "rollout.agent" not in line),
        "train={num_steps: 2, eval_interval: 0, warm_start: {num_steps: 0}}",
        "checkpoint.interval=0",
        'rollout={response_length: 120, max_num_seqs: 3, stop: ["1", "2", "3", "5", "h", "e", "W", "n", "<"]}',
        "rollout.multi_turn={max_assistant_turns: null}",
        "rollout.agent={environment: " + ECHO + ", environment_kwargs: {most_s: 0}, num_workers: 4}",
    ]
    files = []
    for folder, most_s in (("at_once", 0.0), ("late", 0.02), ("later", 0.05)):
        rows = runs.train_in_pool(tmp_path / folder, [*echo, f"rollout.agent.environment_kwargs.most_s={most_s}"], 1)
        timings = [json.loads(line) for line in (tmp_path / folder / "run" / "timings.jsonl").read_text().splitlines()]
        work = [{name: row[f"perf/rollout/{name}"] for name in WORK} for row in timings if "perf/throughput" in row]
        assert work
        files.append((told(rows), work, samples(tmp_path / folder)))
    assert files[0] == files[1] == files[2]
    rows = [row for row in files[0][0] if "num_turns/mean" in row]
    assert max(row["num_turns/max"] for row in rows) == 8
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < PROBABILITY
    assert all(one["reread_tokens"] == 0 for one in files[0][1])


LATE = "longer than its limit of 3 s"
FAULTS = {
    "hangs": (LATE,), "dies": ("its worker process died",), "shouts": ("ValueError: xxx",),
    "forks": ("64 processes", LATE), "writes": ("PermissionError",), "connects": ("PermissionError",),
}  # fmt: skip
"""What is said of each: how many processes there are is looked at now and then, so that a busy machine may be late."""


def test_tools_that_do_wrong_end_at_their_limit_and_are_named_and_the_job_goes_on(tmp_path):
    rows = [{"prompt": "<1-7>", "answer": None, "fault": fault} for fault in [*FAULTS, "none", "none"]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = set(SERVER.children())
    settings = [
        *(line for line in GUESSING if not line.startswith(("data=", "rollout.agent", "~data"))),
        "~data.task", "~data.task_kwargs", f"data={{train_files: [{tmp_path}/rows.jsonl], shuffle: false}}",
        "train={num_steps: 2, batch_size: 8, minibatch_size: 8, eval_interval: 0, warm_start: {num_steps: 0}}",
        "rollout={n: 1, response_length: 80}", "algorithm.name=reinforce_pp", "checkpoint.interval=0",
        'rollout.stop=["1", "2", "3", "4", "5", "6", "7", "8", "h", "e", "g"]', "reward.max_failed_frac=1",
        f"rollout.agent={{environment: '{ECHO[:-4]}Faulty', environment_kwargs: {{folder: {tmp_path}}}}}",
        "rollout.agent.num_workers=3",
        "rollout.agent.time_limit_s=3", "observe.num_samples=8",
    ]  # fmt: skip
    told_of = [row for row in runs.train_in_pool(tmp_path, settings, 1) if "critic/score/mean" in row]
    assert [row["critic/score/mean"] for row in told_of] == [1.0, 1.0]
    assert [row["episode/environment_timeout_frac"] + row["episode/environment_failed_frac"] for row in told_of] == [
        len(FAULTS) / len(rows)
    ] * 2
    for row in samples(tmp_path):
        fault = rows[row["uid"] % len(rows)]["fault"]
        error = row["reward_error"]
        assert error is None if fault == "none" else any(words in error for words in FAULTS[fault]), error
    notes = (tmp_path / "run" / "notes.jsonl").read_text()
    assert all(f"rows.jsonl:{line} (uid" in notes for line in range(1, 1 + len(FAULTS)))
    assert not (tmp_path / "outside").exists()
    left = set(SERVER.children()) - before
    assert not [one for one in left if one.is_running() and "mrl.environments" in " ".join(one.cmdline())]


def test_two_ranks_of_an_engine_have_the_episodes_of_one(uninterrupted, tmp_path):
    _, expected = uninterrupted
    two = ["rollout.tensor_model_parallel_size=2", "parallel.tensor_model_parallel_size=2", "train.num_steps=1"]
    found = told(runs.train_in_pool(tmp_path, [*GUESSING, *two], 2))
    for name in ("rollout/token_checksum", "num_turns/mean", "episode/sampled_frac", "critic/score/mean"):
        assert found[-1][name] == pytest.approx(expected[len(found) - 1][name], rel=WITHIN), name
    for rows in (found, expected):
        differs = [row["training/rollout_probs_diff_max"] for row in rows if "num_turns/mean" in row]
        assert differs and max(differs) < PROBABILITY
