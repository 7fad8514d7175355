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
    with pytest.raises(ValueError, match=r"holds no number"):
        score("1", answer)


@pytest.mark.parametrize(("response", "pred"), [("so 1,234.50", "1234.5"), ("1234.5!", "1234.5"), ("none", "")])
def test_it_says_which_number_it_read(response, pred):
    assert numeric(prompt="", response=response, answer="1", extra={})["pred"] == pred
