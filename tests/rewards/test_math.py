import threading
import time

import pytest

from mrl.config.boxed import last_boxed
from mrl.rewards.math import math

LINEAR_TIME_S = 2.0  # milliseconds when linear; minutes when quadratic


def score(response, answer, **kwargs):
    return math(prompt="", response=response, answer=answer, extra={}, **kwargs)["score"]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{49}.", "49"),
        (r"\boxed{\frac{2}{4}}", "1/2"),
        (r"\boxed{\dfrac{3}{4}}", "0.75"),
        (r"\boxed{0.75}", r"\frac{3}{4}"),
        (r"\boxed{50\%}", "0.5"),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
        (r"\boxed{x^2+2x+1}", "(x+1)^2"),
        (r"\boxed{x=5}", "5"),
        (r"\boxed{5}", "x=5"),
        (r"\boxed{1,000}", "1000"),
        (r"\boxed{90^\circ}", "90"),
        (r"\boxed{10\text{ cm}}", "10"),
        (r"\boxed{\{2,1\}}", r"\{1,2\}"),
        (r"\boxed{(1,2)}", "(1,2)"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{-3}", "-3"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed{1/2}", r"$\frac12$"),
        (r"\boxed{1/2}", r"The answer is \boxed{\frac12}"),
        ("the answer is 7", "7"),
        ("it is $\\frac{1}{2}$", "0.5"),
        (r"\boxed{7} and then \boxed{unclosed", "7"),
    ],
)
def test_equal_expressions_are_correct(response, answer):
    assert score(response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{48}", "49"),
        (r"\boxed{0.333}", "1/3"),
        (r"\boxed{(2,1)}", "(1,2)"),
        (r"\boxed{x^2}", "x^3"),
        (r"\boxed{-3}", "3"),
        (r"first \boxed{2}, then \boxed{1}", "2"),
        (r"\boxed{}", "7"),
        (r"\boxed{", "7"),
        ("", "7"),
        ("no idea", "7"),
        (r"\boxed{" + "1+" * 200 + "1}", "201"),
    ],
)
def test_other_expressions_are_wrong(response, answer):
    assert score(response, answer) == 0.0


def test_a_box_can_be_required():
    assert score("the answer is 7", "7", require_boxed=True, wrong=-1.0) == -1.0
    assert score(r"\boxed{7}", "7", require_boxed=True, correct=2.0) == 2.0


@pytest.mark.parametrize("answer", [None, "", "\\text{}"])
def test_an_answer_that_is_no_expression_fails(answer):
    with pytest.raises(ValueError, match=r"answer"):
        score(r"\boxed{7}", answer)


def test_it_works_outside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(score(r"\boxed{2/4}", "1/2")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_a_hopeless_response_is_scanned_in_linear_time():
    start = time.process_time()
    assert last_boxed(r"\boxed{" * 100_000) is None
    assert last_boxed(r"\boxed{1" + "{" * 100_000 + "}" * 100_001) is not None
    assert time.process_time() - start < LINEAR_TIME_S


@pytest.mark.parametrize(
    ("response", "pred"), [(r"\boxed{ 7/2 }", "7/2"), (r"\boxed{49}", "49"), ("it is 3.5", "3.5"), ("no idea", "")]
)
def test_it_says_which_expression_it_read(response, pred):
    assert math(prompt="", response=response, answer="49", extra={})["pred"] == pred


@pytest.mark.parametrize(
    ("answer", "response", "score"),
    [
        ("5 km", "5 km", 1), ("5 km", "5", 1), ("5 km", "5 miles", 1), (r"5\text{ cm}^2", r"5\text{ cm}^3", 1),
        (r"\$18", "18 euros", 1), ("2.5 hours", "2.5 minutes", 1), ("10 am", "10 pm", 1), ("5 km", "5000 m", 0),
        ("100 cm", "1 m", 0), ("3 hours", "180 minutes", 0),
    ],
)  # fmt: skip
def test_units_are_not_compared_as_the_page_says(answer, response, score):
    found = math(prompt="", response=rf"So \boxed{{{response}}}", answer=answer, extra={})
    assert found["score"] == score
