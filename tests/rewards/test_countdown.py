# ruff: noqa: RUF001 -- the signs are written as models write them
"""Equations are compared by value and by the numbers that they use."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.rewards.countdown import countdown

TASK = json.dumps({"target": 98, "numbers": [44, 19, 35]})


def score(response, answer=TASK, **kwargs):
    return countdown(prompt="", response=response, answer=answer, extra={}, **kwargs)["score"]


RIGHT = ["44+19+35", "(35 + 44) + 19 = 98", "-(-44) + 19 + 35", "44 − -19 + 35"]
WRONG = {
    "another value": "44-19-35",
    "a number twice": "44+19+35+19-19",
    "a number left out": "44+54",
    "a number that is not given": "98",
    "another value after the sign": "44+19+35 = 99",
    "division by zero": "44/(19-19)+35",
    "a power": "44**1+19+35",
    "whole division": "44//1",
    "a name": "__import__('os').getpid()",
    "a call": "(44)(19)",
    "no end": "(44+19+35",
    "leading zero": "044+19+35",
    "nothing": "",
    "digits only": "9" * 5000,
    "deep": "(" * 100 + "44" + ")" * 100,
}


@pytest.mark.parametrize("equation", RIGHT)
def test_an_equation_with_each_number_once_and_the_value_is_right(equation):
    assert score(f"<think>44-19</think><answer> {equation} </answer>") == 1.0
    assert score(rf"\boxed{{{equation}}}") == 1.0


@pytest.mark.parametrize("why", WRONG)
def test_other_equations_have_the_format_only(why):
    assert score(f"<answer>{WRONG[why]}</answer>", format_score=0.1) == 0.1


@pytest.mark.parametrize("response", ["44+19+35", "<think><answer>44+19+35</answer>", "The answer is 44+19+35."])
def test_a_response_without_an_answer_outside_its_reasoning_is_wrong(response):
    assert score(response, format_score=0.1) == 0.0


def test_the_value_is_exact_and_other_signs_are_read():
    task = json.dumps({"target": 1, "numbers": [1, 3, 3]})
    assert score("<answer>1 ÷ 3 × 3</answer>", task) == 1.0
    assert score("<answer>1/3*3</answer>", json.dumps({"target": 1, "numbers": [1, 3, 4]})) == 0.0


def test_numbers_may_stay_unused_where_the_config_says_so():
    task = json.dumps({"target": 63, "numbers": [44, 19, 35]})
    assert [score("<answer>44+19</answer>", task, use_all=use_all) for use_all in (True, False)] == [0.0, 1.0]


@pytest.mark.parametrize("answer", [None, "", "98", "[1]", '{"target": 3}', '{"target": 1.5, "numbers": [1]}'])
def test_a_row_without_target_and_numbers_fails(answer):
    with pytest.raises(ValueError, match="expected"):
        score("<answer>1</answer>", answer)


@settings(max_examples=60, deadline=None)
@given(st.recursive(st.integers(1, 99).map(str), lambda one: st.tuples(one, st.sampled_from("+-*"), one).map(
    lambda parts: f"({''.join(parts)})"), max_leaves=6))  # fmt: skip
def test_values_are_those_of_python(equation):
    numbers = [int(one) for one in re.findall(r"\d+", equation)]
    target = eval(equation)  # integers and + - * that this test made
    assert score(f"<answer>{equation}</answer>", json.dumps({"target": target, "numbers": numbers})) == 1.0
    assert score(f"<answer>{equation}</answer>", json.dumps({"target": target + 1, "numbers": numbers})) == 0.0
