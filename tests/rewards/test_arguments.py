"""Kwargs that cannot work are refused before a run begins, and so are rows that a reward cannot score."""

import json

import pytest

from mrl.config.config import RewardConfig, RewardFunctionConfig, load
from mrl.errors import UserError
from mrl.rewards._bound_reward import RewardCall
from mrl.rewards.scorer import Scorer
from mrl.trainer.run_plan import check_run
from tests.rewards.rollouts import TOKENIZER, rollout, scorer

HERE = "tests.rewards.test_arguments"
JUDGE = {"url": "http://127.0.0.1:9/v1", "model": "m"}


def repeats(*, prompt, response, answer, extra, times: int = 1, mark: str = "a", sizes: list[int] | None = None):
    return float(response == mark * times)


def _check_times(*, times=1, **others):
    if times < 1:
        raise ValueError(f"times={times}, expected at least 1")


repeats.check_kwargs = _check_times

REFUSED = [
    ("regex", {"pattern": "("}),
    ("regex", {"pattern": "[z-a]"}),
    ("regex", {"pattern": 5}),
    ("regex", {"pattern": "a", "whole": "yes"}),
    ("regex", {"pattern": "a", "correct": float("nan")}),
    ("regex", {}),
    ("length", {"target": 100, "limit": 100}),
    ("length", {"target": 100, "limit": 200, "shape": "step"}),
    ("length", {"target": "100", "limit": 200}),
    ("length", {"target": -1, "limit": 200}),
    ("length", {"target": 100, "limit": 200, "penalty": float("inf")}),
    ("length", {"target": True, "limit": 200}),
    ("numeric", {"rel_tolerance": -1.0}),
    ("numeric", {"rel_tolerance": "1e-6"}),
    ("numeric", {"abs_tolerance": float("nan")}),
    ("numeric", {"correct": None}),
    ("math", {"max_chars": 0}),
    ("math", {"max_chars": 2.5}),
    ("math", {"require_boxed": 1}),
    ("math", {"boxed": True}),
    ("exact_match", {"strip": "no"}),
    ("exact_match", {"wrong": float("inf")}),
    ("code", {"max_tests": 0}),
    ("code", {"test_time_s": 0}),
    ("code", {"limit_s": -1.0}),
    ("code", {"memory_mb": 1}),
    ("code", {"tests_key": ""}),
    ("code", {"tests_key": 3}),
    ("code", {"partial": "no"}),
    ("environment", {"scale": 2}),
    (f"{HERE}:repeats", {"times": "3"}),
    (f"{HERE}:repeats", {"times": 0}),
    (f"{HERE}:repeats", {"mark": 7}),
    (f"{HERE}:repeats", {"sizes": ["a"]}),
    (f"{HERE}:repeats", {"time": 3}),
]


@pytest.mark.parametrize(("name", "kwargs"), REFUSED)
def test_kwargs_that_could_only_fail_at_the_first_call_are_refused(name, kwargs):
    with pytest.raises(UserError, match="reward.functions: "):
        RewardCall(name, kwargs)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("regex", {"pattern": r"\d+", "whole": True, "correct": 1}),
        ("length", {"target": 0, "limit": 200, "penalty": 1, "shape": "cosine"}),
        ("numeric", {"rel_tolerance": 0, "correct": 2}),
        ("math", {"max_chars": 10, "wrong": -1}),
        ("code", {"tests_key": None, "limit_s": 5}),
        (f"{HERE}:repeats", {"times": 2.0, "sizes": [1]}),
    ],
)
def test_kwargs_that_work_are_accepted(name, kwargs):
    assert RewardCall(name, kwargs).name == name


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("judge", {"url": 5}),
        ("judge", {"prompt": 5}),
        ("judge", {"concurrency": "16"}),
        ("judge", {"key_env": 5}),
        ("judge", {"request": ["max_tokens"]}),
        ("judge", {"scale": ["0", "1"]}),
        ("judge", {"prompt": "Grade it."}),
        ("rubric", {"criteria_key": 5}),
        ("rubric", {"criteria": [{"name": "x"}]}),
    ],
)
def test_arguments_of_judges_are_refused(name, kwargs):
    pytest.importorskip("httpx")
    with pytest.raises(UserError, match=f"reward.functions: '{name}'"):
        scorer((name, 1.0, JUDGE | kwargs))


def test_a_limit_that_the_workers_own_comes_before_is_refused():
    with pytest.raises(UserError, match=r"limit_s=12 must be below reward.time_limit_s=10"):
        scorer(("code", 1.0, {"limit_s": 12.0}))
    with pytest.raises(UserError, match=r"limit_s=8 must be below reward.time_limit_s=5"):
        scorer("code", time_limit_s=5.0)


def prompts(answers, **row):
    found = [rollout("", uid=place, answer=answer, extra=dict(row)).prompt for place, answer in enumerate(answers)]
    for one in found:
        one.row.update(row)
    return found


ROWS = [
    ("exact_match", {}, ["3", "4"], [None, None]),
    ("numeric", {}, ["3", "#### 4"], ["many", "none"]),
    ("math", {}, ["3", r"\$18"], ["", " "]),
    ("code", {}, ['["assert f(1)"]', '{"inputs": ["1"], "outputs": ["2"]}'], ["[1]", "[]"]),
    ("code", {"tests_key": "tests"}, [], ["3", "4"]),
    ("judge", {**JUDGE, "prompt": "{response} {answer}"}, ["3", None], []),
    ("judge", {**JUDGE, "prompt": "{response} {level}"}, [], ["3", "4"]),
    ("rubric", JUDGE, [], ["3", "4"]),
    ("environment", {}, [], ["3", "4"]),
]


@pytest.mark.parametrize(("name", "kwargs", "good", "bad"), ROWS)
def test_rows_that_a_reward_cannot_score_are_found_before_the_run(name, kwargs, good, bad):
    if name in ("judge", "rubric"):
        pytest.importorskip("httpx")
    with scorer((name, 1.0, kwargs), time_limit_s=60.0) as judge:
        warnings = judge.check_rows(prompts([*good, *bad[:1]]) if good else [], "training")
        assert len(warnings) == bool(good and bad)
        if bad:
            with pytest.raises(UserError, match=rf"reward '{name}' cannot score .*train.jsonl:1"):
                judge.check_rows(prompts(bad), "training")


def test_an_environment_rewards_episodes():
    with scorer("environment") as judge:
        assert judge.check_rows(prompts(["3"]), "training", episodes=True) == []


def test_functions_of_a_users_own_are_not_called_for_it():
    config = RewardConfig(functions=[RewardFunctionConfig("tests.rewards.functions:does_what_it_reads")])
    with Scorer(config, TOKENIZER.decode) as judge:
        assert judge.check_rows(prompts(["3"]), "training") == []


@pytest.mark.parametrize("bad", ["train", "val"])
def test_rows_of_one_file_are_not_judged_with_those_of_another(bad, tmp_path):
    """Every answer of one file is empty, and the other has as many good rows as are looked at."""
    for name in ("train", "val"):
        rows = [{"prompt": f"<{n}>", "answer": "" if name == bad else "3"} for n in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "config.yaml"
    config.write_text(
        'model: {preset: qwen2_tiny, tokenizer: "char:0123456789<>", dtype: float32}\n'
        f"data: {{train_files: [{tmp_path}/train.jsonl], val_files: [{tmp_path}/val.jsonl]}}\n"
        "train: {num_steps: 1, batch_size: 1}\nrollout: {prompt_length: 8, response_length: 8}\n"
        "reward: {functions: [{name: math}]}\n"
    )
    kind = "training" if bad == "train" else "held-out"
    with pytest.raises(UserError, match=f"cannot score 32 of the first 32 {kind} rows"):
        check_run(load(config, [f"run.output_dir={tmp_path}/run"]), 1)


@pytest.mark.parametrize("prompt", ["<3>", "?"])
def test_a_mistake_in_every_row_is_named_in_the_first_row_of_the_file(prompt, tmp_path):
    """Prompts come shuffled; of 400 rows the first one is not among those that are looked at before the run."""
    rows = "".join(json.dumps({"prompt": prompt, "answer": ""}) + "\n" for _ in range(400))
    (tmp_path / "train.jsonl").write_text(rows)
    config = tmp_path / "config.yaml"
    config.write_text(
        'model: {preset: qwen2_tiny, tokenizer: "char:0123456789<>", dtype: float32}\n'
        f"data: {{train_files: [{tmp_path}/train.jsonl]}}\ntrain: {{num_steps: 1, batch_size: 1}}\n"
        "rollout: {prompt_length: 8, response_length: 8}\nreward: {functions: [{name: math}]}\n"
    )
    with pytest.raises(UserError, match=r"train\.jsonl:1: "):
        check_run(load(config, [f"run.output_dir={tmp_path}/run"]), 1)
