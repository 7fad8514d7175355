"""Runs that a reward model rewards: beside functions and alone, at other layouts, killed and resumed, evaluated."""

import json

import pytest

from mrl.data.tokenizer import CharTokenizer
from tests.e2e import runs
from tests.e2e.test_resume import kill_after
from tests.ranks import run_ranks
from tests.reward_models import CHARACTERS, scores_of, write_reward_model

pytestmark = pytest.mark.slow

STEPS = [
    "train={num_steps: 4, batch_size: 4, minibatch_size: 2, eval_interval: 1, warm_start: {num_steps: 2}}",
    "algorithm.dynamic_sampling=true",
    "checkpoint.interval=2",
    "observe.num_samples=16",
]
SCORE = 1e-5  # as in trainer/test_reward_model.py
RELATIVE, ABSOLUTE = 1e-3, 1e-4  # fp32 sums in another order, through steps of Adam
LAYOUTS = {
    "tp2": "parallel={tensor_model_parallel_size: 2, sequence_parallel: true}",
    "pp2": "parallel={pipeline_model_parallel_size: 2}",
    "cp2": "parallel={context_parallel_size: 2}",
    "dp2": "parallel.tensor_model_parallel_size=1",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "reward"
    return folder, write_reward_model(folder, "qwen3_tiny", num_hidden_layers=4)


@pytest.fixture(scope="module")
def overrides(model):
    return [*STEPS, f"reward.model={{path: '{model[0]}', weight: 0.5}}"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, overrides):
    folder = tmp_path_factory.mktemp("run")
    return folder, runs.train_in_pool(folder, overrides, 1)


def samples(folder):
    return [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]


def test_the_reward_is_the_sum_with_what_transformers_gives(uninterrupted, model):
    rows, tokenizer = samples(uninterrupted[0]), CharTokenizer(CHARACTERS)
    assert {row["phase"] for row in rows} == {"train", "val"}
    wanted = scores_of(model[1], [tokenizer.encode(row["prompt"] + row["response"]) for row in rows]).tolist()
    for row, score in zip(rows, wanted, strict=True):
        parts = row["reward_parts"]
        assert list(parts) == ["exact_match", "length", "model"]
        assert parts["model"] == pytest.approx(score, abs=SCORE)
        assert row["reward"] == pytest.approx(parts["exact_match"] + 0.1 * parts["length"] + 0.5 * parts["model"])
    assert len({round(score, 4) for score in wanted}) > 20


def test_its_mean_is_told(uninterrupted):
    rows = [row for row in uninterrupted[1] if "reward/model/mean" in row]
    assert len(rows) == 4 and len({row["reward/model/mean"] for row in rows}) == 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_steps_are_the_same_at_another_layout(layout, uninterrupted, overrides, tmp_path):
    found = runs.train_in_pool(tmp_path, [*overrides, "train.num_steps=1", LAYOUTS[layout]], 2)
    wanted = {row["step"]: row for row in uninterrupted[1] if "reward/model/mean" in row}[1]
    (row,) = [row for row in found if "reward/model/mean" in row]
    for name in ("reward/model/mean", "critic/rewards/mean", "actor/pg_loss", "actor/grad_norm"):
        assert row[name] == pytest.approx(wanted[name], rel=RELATIVE, abs=ABSOLUTE), name


def test_a_killed_run_continues_as_if_nothing_had_happened(uninterrupted, overrides, tmp_path):
    kill_after(runs.fork(tmp_path, overrides), tmp_path, 7)
    assert runs.train_in_pool(tmp_path, overrides, 1) == uninterrupted[1]


def evaluated(folder, overrides):
    from mrl.config.config import load
    from mrl.distributed import launch
    from mrl.megatron import parallel_state
    from mrl.train import evaluate

    parallel_state.destroy()
    launch.shutdown_distributed()
    try:
        return evaluate(load(f"{folder}/config-given.yaml", [f"run.output_dir={folder}/run", *overrides]))
    finally:
        launch.init_distributed("cpu", num_threads=1)


def test_an_evaluation_rewards_with_it(uninterrupted, overrides):
    folder, rows = uninterrupted
    (found,) = run_ranks(1, evaluated, str(folder), overrides)
    (last,) = [row["val/reward/mean"] for row in rows if "val/reward/mean" in row][-1:]
    assert found["val/reward/mean"] == last


def test_it_rewards_alone_and_with_no_weight_it_is_only_measured(model, tmp_path):
    path = f"reward.model.path={model[0]}"
    short = [*STEPS, "train.num_steps=1", path]
    alone = runs.train_in_pool(tmp_path / "alone", [*short, "reward.functions=[]"], 1)
    (row,) = [row for row in alone if "reward/model/mean" in row]
    assert row["critic/score/mean"] == pytest.approx(row["reward/model/mean"])
    beside = runs.train_in_pool(tmp_path / "beside", [*short, "reward.model.weight=0"], 1)
    (row,) = [row for row in beside if "reward/model/mean" in row]
    told = row["reward/exact_match/mean"] + 0.1 * row["reward/length/mean"]
    assert row["critic/score/mean"] == pytest.approx(told) and row["reward/model/mean"] != 0
