# ruff: noqa: RUF001 -- the forms are written as models write them
import time

import pytest

from mrl.rewards._numbers import last_number
from mrl.rewards.numeric import numeric

LINEAR_TIME_S = 2.0  # milliseconds when linear; minutes when quadratic


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so x = -4", -4.0),
        ("10-4", 4.0),
        ("10 - 4 = 6.", 6.0),
        ("(3)-4", 4.0),
        ("1,234.5 m", 1234.5),
        ("$1,000,000", 1e6),
        ("1,2345", 2345.0),
        ("2e-3", 0.002),
        ("-.5", -0.5),
        ("a1b2", 2.0),
        ("none", None),
        ("", None),
        ("9" * 500, None),
        ("1e999", None),
    ],
)
def test_the_last_number_is_read(text, number):
    found = last_number(text)
    assert (found and found.value) == number


@pytest.mark.parametrize("text", ["1" + ",111" * 50_000 + "1", "1" * 200_000 + "x", ".-+" * 100_000, "1e+" * 100_000])
def test_a_long_response_takes_linear_time(text):
    start = time.process_time()
    last_number(text)
    assert time.process_time() - start < LINEAR_TIME_S


def score(response, answer, **kwargs):
    return numeric(prompt="", response=response, answer=answer, extra={}, **kwargs)["score"]


def test_values_within_the_tolerance_are_equal():
    assert score("about 3.14159", "3.14159265") == 1.0
    assert score("3.14", "3.14159265") == 0.0
    assert score("3.14", "3.14159265", rel_tolerance=1e-3) == 1.0
    assert score("0.01", "0", abs_tolerance=0.1) == 1.0
    assert score("no idea", "3", wrong=-1.0) == -1.0
    assert score("#### 42", "#### 42", correct=2.0) == 2.0


@pytest.mark.parametrize("answer", [None, "", "many"])
def test_an_answer_without_a_number_fails(answer):
    with pytest.raises(ValueError, match=r"contains no number"):
        score("1", answer)


@pytest.mark.parametrize(("response", "pred"), [("so 1,234.50", "1234.5"), ("1234.5!", "1234.5"), ("none", "")])
def test_it_says_which_number_it_read(response, pred):
    assert numeric(prompt="", response=response, answer="1", extra={})["pred"] == pred


FORMS = [
    # response, right, wrong
    ("The answer is −5.", "-5", "5"),
    ("The answer is –5.", "-5", "5"),
    ("The answer is - 7.", "-7", "7"),
    ("x = − 7", "-7", "7"),
    ("−5", "-5", "5"),
    ("(−5)", "-5", "5"),
    ("**-5**", "-5", "5"),
    ("-$5", "-5", "5"),
    ("$−5", "-5", "5"),
    ("−$1,234.50", "-1234.5", "1234.5"),
    ("Answer - 7", "7", "-7"),
    ("Result – 7 apples", "7", "-7"),
    ("Result—7", "7", "-7"),
    ("One of these:\n- 7", "7", "-7"),
    ("3-5", "5", "-5"),
    ("pages 3–5", "5", "-5"),
    ("COVID-19", "19", "-19"),
    ("５８", "58", "5"),
    ("−５８．", "-58", "58"),
    ("٤٢", "42", "4"),
    ("𝟓𝟖", "58", "8"),
    ("1,234", "1234", "234"),
    ("1 234", "1234", "234"),
    ("1\u202f234", "1234", "234"),
    ("1'234", "1234", "234"),
    (r"1\,234", "1234", "234"),
    ("1{,}234", "1234", "234"),
    (r"\$32,\!348", "32348", "348"),
    ("$18", "18", "8"),
    ("18€", "18", "8"),
    ("50%", "50", "5"),
    ("50%", "0.5", "0.05"),
    ("0.5", "50%", "5%"),
    ("50%", "50%", "0.5%"),
    ("2e-3", "0.002", "3"),
    ("2 × 10^3", "2000", "3"),
    (r"2 \times 10^{-3}", "0.002", "-3"),
    ("2·10³", "2000", "3"),
    ("10^3", "1000", "3"),
    ("25 m^2", "25", "2"),
    ("25 m²", "25", "2"),
    ("1/2", "0.5", "2"),
    (r"\frac{1}{2}", "1/2", "2"),
    (r"-\frac{1}{2}", "-0.5", "0.5"),
    ("2 1/2", "2.5", "0.5"),
    ("2½", "2.5", "0.5"),
    ("3 million", "3000000", "3"),
    ("5.", "5", "0.5"),
    ("58。", "58", "8"),
    (r"\boxed{58} in 3 steps", "58", "3"),
    ("<answer>58</answer> in 3 steps", "58", "3"),
    ("#### 58\nin 3 steps", "58", "3"),
    ("The answer is 58. See step 3.", "58", "3"),
    ("The answer is clear: 58", "58", "5"),
    ("<think>I get 42.</think>58", "58", "42"),
    ("58<think>or 42", "58", "42"),
]


@pytest.mark.parametrize(("response", "right", "wrong"), FORMS)
def test_a_form_equals_the_right_number_and_no_other(response, right, wrong):
    assert (score(response, right), score(response, wrong)) == (1.0, 0.0)


@pytest.mark.parametrize("response", ["<think>42", "<thinking>42</thinking>", r"\boxed{4", "42</think>"])
def test_a_number_that_is_no_answer_is_not_read(response):
    assert score(response, "42") == 0.0
