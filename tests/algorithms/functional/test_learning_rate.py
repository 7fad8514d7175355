"""Warm-up, shapes, and what stands before and behind the last step."""

from types import SimpleNamespace

import pytest

from mrl.algorithms.functional.learning_rate import LearningRate

EXACT = 1e-12  # fp64


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("constant", [2.5, 5.0, 7.5, 10.0, 10.0, 10.0, 10.0, 10.0]),
        ("linear", [2.5, 5.0, 7.5, 10.0, 10.0, 7.0, 4.0, 1.0]),
        ("cosine", [2.5, 5.0, 7.5, 10.0, 10.0, 7.75, 3.25, 1.0]),
        ("wsd", [2.5, 5.0, 7.5, 10.0, 10.0, 10.0, 5.5, 1.0]),
    ],
)
def test_warm_up_is_linear_and_the_last_step_has_the_minimum(shape, expected):
    rate = LearningRate(10.0, 1.0, shape, warmup_steps=4, num_steps=8, decay_steps=2)
    assert [rate.at(step) for step in range(8)] == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("shape", ["linear", "cosine", "wsd"])
def test_behind_the_last_step_the_minimum_stays(shape):
    rate = LearningRate(10.0, 1.0, shape, warmup_steps=0, num_steps=3)
    assert rate.at(0) == 10.0
    assert rate.at(2) == pytest.approx(1.0, rel=EXACT)
    assert rate.at(50) == pytest.approx(1.0, rel=EXACT)


def test_a_schedule_of_one_step_starts_at_the_peak():
    assert LearningRate(10.0, 1.0, "linear", 0, 1).at(0) == 10.0


def test_wsd_is_megatrons_with_a_linear_decay():
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group = {"max_lr": 10.0, "min_lr": 1.0, "lr": 0.0}
    num_steps, warmup, decay = 40, 5, 8
    theirs = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]), init_lr=0.0, max_lr=10.0, min_lr=1.0, lr_warmup_steps=warmup,
        lr_decay_steps=num_steps, lr_decay_style="WSD", start_wd=0.0, end_wd=0.0, wd_incr_steps=num_steps,
        wd_incr_style="constant", wsd_decay_steps=decay, lr_wsd_decay_style="linear",
    )  # fmt: skip
    expected = []
    for _ in range(num_steps):
        theirs.step(1)
        expected.append(theirs.get_lr(group))  # of the step that was just counted
    rate = LearningRate(10.0, 1.0, "wsd", warmup, num_steps, decay)
    assert [rate.at(step) for step in range(num_steps)] == pytest.approx(expected, rel=EXACT)
