"""verl's default reward: the same scores as verl's own function (`verl_scores.json`)."""

import json
import math
from pathlib import Path

import pytest

from mrl.rewards.by_data_source import SOURCES, by_data_source
from mrl.types import Prompt
from tests.rewards.rollouts import rollout, scorer

GOLDEN = json.loads(Path(__file__).with_name("verl_scores.json").read_text())
TESTS = {"inputs": ["2\n", "3\n", "4\n"], "outputs": ["4", "9", "16"]}


def score(source, response, answer):
    return by_data_source(data_source=source, solution_str=response, ground_truth=answer)


@pytest.mark.parametrize("source", sorted({source for source, *_ in GOLDEN}))
def test_scores_are_verls(source):
    cases = [case[1:] for case in GOLDEN if case[0] == source]
    assert {wanted for _, _, wanted in cases} == ({1.0, -1.0} if source.startswith(("math", "aime")) else {1.0, 0.0})
    for answer, response, wanted in cases:
        found = score(source, response, answer)
        assert (found["score"], found["acc"]) == (wanted, float(wanted == 1.0)), (answer, response)


def test_formulas_are_compared_by_value():
    assert score("lighteval/MATH", r"\boxed{0.5}", r"\frac{1}{2}")["score"] == 1.0
    assert score("numina_cn_k12", "The answer is 7.", "7")["score"] == 1.0
    assert score("hiyouga/geometry3k", r"<think>x</think> \boxed{5}", "5")["score"] == pytest.approx(1.0)
    assert score("hiyouga/geometry3k", r"<think>x</think> \boxed{6}", "5")["score"] == pytest.approx(0.1)
    assert score("hiyouga/geometry3k", r"\boxed{5}", "5")["score"] == pytest.approx(0.9)


def test_programs_score_the_fraction_of_passed_tests():
    program = "```python\nx = int(input())\nprint(x * x if x < 4 else 0)\n```"
    assert score("codecontests", program, TESTS)["score"] == pytest.approx(2 / 3)
    assert score("taco", program, json.dumps(TESTS))["score"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("source", ["train", "", "countdown", "searchR1_other"])
def test_an_unknown_source_is_an_error_that_lists_the_known_ones(source):
    with pytest.raises(ValueError, match="openai/gsm8k"):
        score(source, "x", "1")


@pytest.mark.parametrize("source", [*SOURCES, "aime"])
def test_a_row_without_an_answer_is_an_error(source):
    with pytest.raises(ValueError):
        score(source, "x", None)


def test_the_rows_data_source_reaches_the_function():
    samples = [rollout("#### 3"), rollout("#### 3", uid=1), rollout("Answer: 4", uid=2)]
    for sample, source in zip(samples, ("openai/gsm8k", "train", "math_dapo"), strict=True):
        one = sample.prompt
        sample.prompt = Prompt(one.uid, one.prompt_ids, one.text, one.answer, {}, one.source, source)
    with scorer("by_data_source") as judge:
        judge.score(samples)
    assert [sample.reward for sample in samples[::2]] == [1.0, -1.0]
    assert math.isnan(samples[1].reward) and "'train'" in samples[1].reward_error
