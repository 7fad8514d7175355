import pytest

from mrl.rewards.regex import regex

FORM = r"<think>.*</think>\s*<answer>.*</answer>"


@pytest.mark.parametrize(
    ("response", "kwargs", "value"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", {}, 1.0),
        ("<answer>4</answer>", {}, 0.0),
        ("well <think></think><answer></answer>", {}, 1.0),
        ("well <think></think><answer></answer>", {"whole": True}, 0.0),
        ("<think></think><answer></answer>", {"whole": True, "correct": 0.2}, 0.2),
        ("", {"wrong": -0.5}, -0.5),
    ],
)
def test_values(response, kwargs, value):
    assert regex(prompt="", response=response, answer=None, extra={}, pattern=FORM, **kwargs) == value
