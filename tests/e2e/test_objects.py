"""Python objects that a script passes to mrl.train: what they see, what a run records of them, and who stops it."""

import functools
import json
import os
import re

import pytest

import mrl
from mrl.trainer.run_plan import build_run_plan
from tests.e2e import runs
from tests.ranks import RankError, run_ranks
from tests.source import PACKAGE

SMALL = ["train={num_steps: 4, batch_size: 4, minibatch_size: 4, warm_start: {num_steps: 0}}", "rollout.n=2"]
TALK = [
    *SMALL, "rollout={prompt_length: 24, response_length: 24}",
    "rollout.multi_turn.max_assistant_turns=2", "model.tokenizer='char:0123456789 <>+aegino,#'",
    "reward.functions=[{name: exact_match}]",
]  # fmt: skip


def run(work, folder, ranks=1):
    """Results of `work(folder)` on each rank, in a job of its own."""
    ports = [runs.free_port(), runs.free_port()]
    return run_ranks(ranks, runs.in_job, functools.partial(work, str(folder)), ports)


def config_of(folder, overrides=SMALL):
    _, file, *rest = runs.arguments(folder, overrides)
    return mrl.load_config(file, rest)


def calls_of(heard, ends_after=None):
    """A callback that notes its calls and ends the run after a step."""

    class Noted(mrl.Callback):
        def on_train_begin(self, opening):
            heard.append(("begin", opening.resume_step))

        def on_step_end(self, step, metrics):
            heard.append(("step", step, "critic/score/mean" in metrics))
            return step == ends_after

        def on_evaluate(self, step, metrics):
            heard.append(("evaluate", step, "val/accuracy" in metrics))

        def on_checkpoint(self, step, path):
            heard.append(("checkpoint", step, path.is_dir()))

        def on_train_end(self, result):
            heard.append(("end", result.step))

    return Noted


def one_of_each(folder):
    heard, logged, scored = [], [], []

    def ones(*, prompt, response, answer, extra):
        scored.append(response)
        return float(response.count("1"))

    async def lengths(completions, log_metric, **columns):
        log_metric("size", len(completions))
        return [len(text) / 10 for text in completions]

    class Lines(mrl.Logger):
        def record(self, phase, step, metrics):
            logged.append((phase, step))

    class Plain(mrl.Algorithm):
        def shape_rewards(self, outcomes):
            return outcomes.rewards_N

        def outcome_advantages(self, outcomes):
            return outcomes.rewards_N - outcomes.rewards_N.mean()

        def advantages(self, batch, outcome_advantages_B, reduce):
            batch.advantages_R = outcome_advantages_B[batch.advantage_index_R].float()

        def loss(self, logprobs_R, entropy_R, microbatch):
            return -(microbatch.weights_R * microbatch.advantages_R * logprobs_R).sum(), {}

    bare = [*SMALL, "~algorithm.kl_in", "~algorithm.kl_coef", "~algorithm.entropy_coef", "~algorithm.clip_low"]
    config = config_of(folder, [*bare, "~algorithm.clip_high", "observe.console=plain"])
    given = {"rewards": [ones, {"name": lengths, "weight": 0.5}], "algorithm": Plain}
    result = mrl.train(config, **given, callbacks=[calls_of(heard, 2)], loggers=[Lines, Lines()])
    refused = ""
    try:
        mrl.train(config)
    except mrl.UserError as error:
        refused = str(error)
    scores = mrl.evaluate(config, **given)
    resumed = mrl.train(config, **given, callbacks=[calls_of(heard)], loggers=[Lines])
    return {
        "result": (result.step, result.stopped_by, result.checkpoint),
        "parts": [result.metrics[f"reward/{name}/mean"] for name in ("ones", "lengths")],
        "score": result.metrics["critic/score/mean"],
        "history": [row["step"] for row in resumed.history if row["phase"] == "train"],
        "evaluated": scores["checkpoint"],
        "resumed": (resumed.step, resumed.stopped_by),
        "heard": heard, "logged": logged, "num_scored": len(scored), "refused": refused,
    }  # fmt: skip


def test_one_of_each_kind_written_from_its_interface_runs_in_this_process(tmp_path):
    (found,) = run(one_of_each, tmp_path)
    step, why, checkpoint = found["result"]
    assert (step, why, checkpoint.name) == (2, "callback Noted", "step-00000002")
    assert found["score"] == pytest.approx(found["parts"][0] + 0.5 * found["parts"][1])
    assert found["num_scored"] > 0  # the closure's own list: no other process
    assert found["evaluated"].endswith("step-00000002")
    assert found["resumed"] == (4, "") and found["history"] == [0, 1, 2, 3, 4]
    assert [each for each in found["heard"] if each[0] in ("begin", "end")] == [
        ("begin", None), ("end", 2), ("begin", 2), ("end", 4),
    ]  # fmt: skip
    assert [each for each in found["heard"] if each[0] == "step"] == [("step", step, True) for step in (1, 2, 3, 4)]
    assert ("evaluate", 0, True) in found["heard"] and ("checkpoint", 2, True) in found["heard"]
    assert found["logged"].count(("train", 1)) >= 2
    assert "python-object:tests.e2e.test_objects.Plain" in found["refused"]


def test_run_json_and_the_config_name_the_objects_and_the_command_line_refuses_them(tmp_path):
    run(one_of_each, tmp_path)
    starts = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    names = {(one["key"], one["name"], one["module"]) for one in starts[0]["objects"]}
    module = "tests.e2e.test_objects"
    assert ("reward.functions[*].name", f"python-object:{module}.ones", module) in names
    with pytest.raises(RankError, match="python-object"):
        run(from_its_config, tmp_path)


def from_its_config(folder):
    mrl.train(mrl.load_config(f"{folder}/run/config.yaml"))


def in_environment(folder):
    class Game(mrl.Environment):
        def reset(self, seed, row):
            self.turn = 0
            return mrl.Observation()

        def step(self, action):
            self.turn += 1
            return mrl.Observation.user("again", reward=1.0) if self.turn == 1 else mrl.Observation(terminated=True)

    return mrl.train(config_of(folder, [*TALK, "train.num_steps=1"]), environments=[Game]).metrics


def test_an_environment_of_the_script_holds_episodes_and_gives_their_reward(tmp_path):
    (metrics,) = run(in_environment, tmp_path)
    assert metrics["num_turns/mean"] > 1 and metrics["episode/environment_failed_frac"] == 0
    assert metrics["critic/score/mean"] == pytest.approx(metrics["reward/environment/mean"])
    assert 0 < metrics["critic/score/mean"] <= 1


def stopped_on_two(folder):
    heard = []
    result = mrl.train(config_of(folder), callbacks=[calls_of(heard, 1)])
    return result.step, result.stopped_by, len(heard)


def failing_on_two(folder):
    class Breaks(mrl.Callback):
        def on_step_end(self, step, metrics):
            raise KeyError("mine")

    try:
        mrl.train(config_of(folder), callbacks=[Breaks])
    except mrl.UserError as error:
        return str(error)


def differing_on_two(folder):
    is_first = os.environ["RANK"] == "0"
    rewards = ["exact_match"] if is_first else [lambda *, prompt, response, answer, extra: 1.0]
    try:
        mrl.train(config_of(folder), rewards=rewards)
    except mrl.UserError as error:
        return str(error)


def test_all_ranks_stop_where_rank_0_decides_and_name_a_failing_callback(tmp_path):
    first, second = run(stopped_on_two, tmp_path / "a", ranks=2)
    assert first[:2] == second[:2] == (1, "callback Noted")
    assert first[2] > 0 and second[2] == 0
    for said in run(failing_on_two, tmp_path / "b", ranks=2):
        assert "callback Breaks" in said and "on_step_end" in said and "KeyError" in said


def test_ranks_with_different_objects_are_refused(tmp_path):
    for said in run(differing_on_two, tmp_path, ranks=2):
        assert "different code" in said


BROKEN = {
    "shape_rewards": ("return outcomes.rewards_N.mean()", "shape_rewards"),
    "outcome_advantages": ("return list(outcomes.rewards_N)", "outcome_advantages"),
    "advantages": ("return None", "advantages"),
    "loss": ("return 1.0", "scalar tensor"),
}


def broken(folder):
    found = {}
    for method, (body, _) in BROKEN.items():
        parts = {}
        exec(f"def {method}(self, outcomes, *rest):\n    {body}", parts)
        algorithm = type("Broken", (mrl.PolicyGradient,), {method: parts[method]})
        try:
            mrl.train(config_of(f"{folder}/{method}", [*SMALL, "train.eval_interval=0"]), algorithm=algorithm)
        except mrl.UserError as error:
            found[method] = str(error)
    return found


def test_an_algorithm_that_breaks_its_interface_is_told_which_method(tmp_path):
    (found,) = run(broken, tmp_path)
    assert found.keys() == BROKEN.keys()
    for method, (_, words) in BROKEN.items():
        assert words in found[method]


CALLBACKS = """
import mrl

class Ends(mrl.Callback):
    def __init__(self, after):
        self.after = after
    def on_step_end(self, step, metrics):
        return step == self.after
"""


def test_observe_callbacks_names_them_by_path(tmp_path):
    (tmp_path / "own.py").write_text(CALLBACKS)
    path = f"{tmp_path}/own.py:Ends"
    rows = runs.train_in_pool(tmp_path, [*SMALL, f"observe.callbacks=[{{name: '{path}', kwargs: {{after: 1}}}}]"], 1)
    assert [row["step"] for row in rows if row["phase"] == "train"][-1] == 1
    for kwargs in ("{later: 1}", "{}"):
        words = runs.arguments(tmp_path / "b", [f"observe.callbacks=[{{name: '{path}', kwargs: {kwargs}}}]"])
        assert run_ranks(1, runs.in_rank, words, [runs.free_port(), runs.free_port()]) == [2]


TASK = """
import mrl

class Count(mrl.Task):
    num_train, num_val = 8, 2

    def train_row(self, index):
        return {"prompt": f"<{index}>", "answer": str(index)}

    def val_row(self, index):
        return {"prompt": f"<{index}+0>", "answer": str(index)}

class Half(mrl.Task):
    num_train = 8

    def train_row(self, index):
        return {"prompt": "<1>", "answer": "1"}

    val_row = train_row

class Less(mrl.Task):
    num_train = num_val = 8

    def train_row(self, index):
        return {"prompt": "<1>", "answer": "1"}

class Unmade(mrl.Algorithm):
    def loss(self, logprobs_R, entropy_R, microbatch):
        return logprobs_R.sum(), {}

class Engine(mrl.RolloutEngine):
    pass
"""


def test_a_task_and_a_policy_loss_from_their_interfaces_train(tmp_path):
    (tmp_path / "own.py").write_text(TASK)
    page = (PACKAGE / "docs" / "objectives.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(# my_algorithm.py.*?)```", page, re.DOTALL)
    (tmp_path / "my_algorithm.py").write_text(block)
    rows = runs.train_in_pool(
        tmp_path,
        [
            *SMALL, f"data={{task: '{tmp_path}/own.py:Count', task_kwargs: {{}}}}", "~algorithm.clip_low",
            "~data.task_kwargs", "~algorithm.clip_high", f"algorithm.name={tmp_path}/my_algorithm.py:Squared",
        ],
        1,
    )  # fmt: skip
    assert [row["step"] for row in rows if row["phase"] == "train"] == [0, 1, 2, 3, 4]
    assert rows[-1]["val/num_prompts"] == 2


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("data.task=FILE:Half", "num_val"),
        ("data.task=FILE:Less", "val_row"),
        ("algorithm.name=FILE:Unmade", "outcome_advantages"),
        ("rollout.name=FILE:Engine", "does not define"),
    ],
)
def test_a_class_that_lacks_a_part_of_its_interface_is_told_which(setting, word, tmp_path):
    (tmp_path / "own.py").write_text(TASK)
    overrides = [setting.replace("FILE", f"{tmp_path}/own.py"), "~data.task_kwargs"]
    _, file, *rest = runs.arguments(tmp_path, overrides)
    with pytest.raises(mrl.UserError, match=word):
        build_run_plan(mrl.load_config(file, rest))
