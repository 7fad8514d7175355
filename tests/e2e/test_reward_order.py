"""Order by past rewards in whole runs: the same prompts on all ranks, in every mode, and after kills."""

import json

import pytest

from tests.e2e import in_flight_kills, runs
from tests.e2e.test_async import LONGER, OVER, OWN, STEPS, ahead
from tests.e2e.test_roles import logged, without_refits

pytestmark = pytest.mark.slow

ROWS = 12
LOGGED = """
import json, os
def order(rows, rewards):
    with open({log!r} + os.environ.get("RANK", "0"), "a") as file:
        file.write(json.dumps([[past.count, past.mean] for past in rewards]) + "\\n")
    return [-(past.mean or 0) for past in rewards]
"""
OWN_RANDOM = """
import random
def order(rows, rewards):
    return [random.SystemRandom().random() for _ in rows]
"""


def settings(folder, text):
    (folder / "curriculum.py").write_text(text.format(log=str(folder / "calls-")) if "{log" in text else text)
    return [f"data.order_by={folder}/curriculum.py:order", f"data.task_kwargs.num_train={ROWS}"]


def source_state(folder, step):
    return json.loads((folder / f"run/checkpoints/step-{step:08}/state.json").read_text())["source"]


def test_the_function_sees_every_scored_response_once_and_other_ranks_do_not_call_it(tmp_path):
    given = [*STEPS, *settings(tmp_path, LOGGED), "train.num_steps=6", "train.minibatch_size=8"]
    runs.train_in_pool(tmp_path, given, 2)
    calls = [json.loads(line) for line in (tmp_path / "calls-0").read_text().splitlines()]
    # Twice when the function is tried, the second time with invented rewards; once for the first prompts and twice in
    # the warm start; then epochs begin in steps 1, 2, 4 and 5.
    counts = [[count for count, _ in call] for call in calls]
    assert [sum(each) for each in counts] == [0, 4 * ROWS * 3 // 4, 0, 0, 0, 0, 1 * 8 * 4, 3 * 8 * 4, 4 * 8 * 4]
    assert counts[-2] == [8] * ROWS
    assert all((mean is None) == (count == 0) for call in calls for count, mean in call)
    others = [json.loads(line) for line in (tmp_path / "calls-1").read_text().splitlines()]
    assert others == [calls[0], calls[1], [[0, None]] * ROWS]


def test_a_function_that_differs_between_ranks_and_calls_gives_all_ranks_the_same_prompts(tmp_path):
    rows = runs.train_in_pool(tmp_path, [*STEPS, *settings(tmp_path, OWN_RANDOM)], 2)
    assert rows[-1]["step"] == 4


MODES = {
    "sync": [],
    "two steps ahead": ahead(2),
    "more than a batch": OVER,
    "dropped": ["algorithm.dynamic_sampling=true"],
}


@pytest.mark.parametrize("name", MODES)
def test_ranks_of_their_own_draw_the_prompts_of_ranks_that_do_both(name, tmp_path):
    given = [*STEPS, *LONGER, *MODES[name], *settings(tmp_path, LOGGED)]
    runs.train_in_pool(tmp_path / "both", given, 1)
    runs.train_in_pool(tmp_path / "own", [*given, f"{OWN}=1"], 2)
    assert without_refits(tmp_path / "both")[0] == without_refits(tmp_path / "own")[0]
    assert logged(tmp_path / "both", "samples.jsonl") == logged(tmp_path / "own", "samples.jsonl")
    assert source_state(tmp_path / "both", 6) == source_state(tmp_path / "own", 6)


@pytest.mark.parametrize("name", ["two steps ahead", "more than a batch"])
def test_a_run_that_is_killed_goes_on_identically(name, tmp_path):
    given = [*LONGER, *MODES[name], *settings(tmp_path, LOGGED)]
    found = in_flight_kills.compare(given, tmp_path, kills=3, seed=len(name), by_torchrun=False)
    assert found["holds"], found
    whole, killed = (source_state(tmp_path / folder, 7) for folder in ("whole", "killed"))
    assert whole == killed and len(whole["order_state"]["epochs"]) >= 1


def test_a_synchronous_run_that_stops_after_each_step_draws_the_prompts_of_one_that_does_not(tmp_path):
    given = [*settings(tmp_path, LOGGED), "checkpoint.interval=1", "train.eval_interval=0"]
    whole = runs.train_in_pool(tmp_path / "whole", [*given, "train.num_steps=5"], 1)
    for step in range(1, 6):
        rows = runs.train_in_pool(tmp_path / "parts", [*given, f"train.num_steps={step}"], 1)
    assert [row.get("critic/score/mean") for row in rows] == [row.get("critic/score/mean") for row in whole]
    assert source_state(tmp_path / "whole", 5) == source_state(tmp_path / "parts", 5)


def test_an_error_of_the_function_in_a_later_epoch_ends_the_run_on_all_ranks(tmp_path):
    text = "def order(rows, rewards):\n    return [1 / (past.mean is None) for past in rewards]\n"
    words = runs.arguments(tmp_path, [*STEPS, *settings(tmp_path, text)])
    statuses = runs.run_ranks(2, runs.in_rank, words, [runs.free_port(), runs.free_port()])
    assert statuses == [2, 2]
