"""Early stopping counts as torch's ReduceLROnPlateau does, and a resumed run ends where an uninterrupted one does."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.config.config import EarlyStoppingConfig
from mrl.trainer.early_stopping import EarlyStopping
from tests.e2e import runs

VALUES = st.lists(st.integers(-6, 6).map(lambda eighths: eighths / 8), min_size=1, max_size=12)
CONFIGS = st.builds(
    EarlyStoppingConfig,
    patience=st.integers(1, 4),
    mode=st.sampled_from(["max", "min"]),
    min_delta=st.sampled_from([0.0, 0.125, 0.5]),
)
NEVER = ["train.eval_interval=1", "train.early_stopping.metric=val/num_prompts"]
"""Evaluations after each step, of a number that does not change."""


def torch_end(config, values):
    """The first evaluation at which torch would lower the learning rate, from 0; None if there is none."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, config.mode, patience=config.patience - 1, threshold=config.min_delta, threshold_mode="abs"
    )
    for step, value in enumerate(values):
        scheduler.step(value)
        if optimizer.param_groups[0]["lr"] < 1.0:
            return step
    return None


@settings(max_examples=100, deadline=None)
@given(config=CONFIGS, values=VALUES, resumed=st.booleans())
def test_it_ends_where_torch_lowers_the_learning_rate(config, values, resumed):
    stopping, end = EarlyStopping(config), None
    for step, value in enumerate(values):
        if resumed:
            state, stopping = json.loads(json.dumps(stopping.state_dict())), EarlyStopping(config)
            stopping.load_state_dict(state)
        stopping.record(step, value)
        if stopping.why:
            end = step
            break
    assert end == torch_end(config, values)


def test_evaluations_before_the_actor_trains_and_values_that_are_not_finite():
    config = EarlyStoppingConfig(patience=2)
    ends = []
    for first_step, values in ((0, [1.0, 1.0, 1.0]), (2, [1.0] * 5), (0, [float("nan")] * 3)):
        stopping = EarlyStopping(config, first_step)
        for step, value in enumerate(values):
            stopping.record(step, value)
            if stopping.why:
                ends.append(step)
                break
    assert ends == [2, 4, 2]


def test_another_metric_starts_anew():
    stopping = EarlyStopping(EarlyStoppingConfig(patience=1))
    stopping.record(0, 1.0)
    stopping.record(1, 1.0)
    other = EarlyStopping(EarlyStoppingConfig(patience=1, metric="val/reward/mean"))
    other.load_state_dict(stopping.state_dict())
    assert stopping.why and not other.why


def ends_after(lines):
    return max(line["step"] for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "mode"),
    [(1, []), (2, ["rollout.num_ranks=1", "train.mode=async"])],
    ids=["sync", "async, one rank that samples"],
)
def test_a_stopped_run_ends_at_the_same_step_and_continues_with_more_patience(tmp_path, ranks, mode):
    patience = "train.early_stopping.patience=3"
    given = [*NEVER, *mode, "checkpoint.export_hf=true"]
    assert ends_after(runs.train_in_pool(tmp_path / "once", [*given, patience, "train.num_steps=9"], ranks)) == 3
    last = tmp_path / "once/run/checkpoints/step-00000003"
    assert (last / "hf").is_dir()
    assert "Early stopping" in (tmp_path / "once/run/notes.jsonl").read_text()

    first = runs.train_in_pool(tmp_path / "twice", [*given, patience, "train.num_steps=2"], ranks)
    assert ends_after(first) == 2
    assert ends_after(runs.train_in_pool(tmp_path / "twice", [*given, patience, "train.num_steps=9"], ranks)) == 3
    assert ends_after(runs.train_in_pool(tmp_path / "twice", [*given, patience, "train.num_steps=9"], ranks)) == 3
    more = [*given, "train.early_stopping.patience=5", "train.num_steps=9"]
    assert ends_after(runs.train_in_pool(tmp_path / "twice", more, ranks)) == 5
