import pytest

from mrl.rewards.exact_match import exact_match


def score(response, answer, finish_reason="stop", **kwargs):
    return exact_match(prompt="", response=response, answer=answer, extra={"finish_reason": finish_reason}, **kwargs)[
        "score"
    ]


@pytest.mark.parametrize(
    ("response", "answer", "kwargs", "value"),
    [
        ("49", "49", {}, 1.0),
        ("4", "49", {}, 0.0),
        ("490", "49", {}, 0.0),
        (" 49\n", "49", {}, 1.0),
        (" 49", "49", {"strip": False}, 0.0),
        ("Paris", "paris", {}, 0.0),
        ("Paris", "paris", {"ignore_case": True}, 1.0),
        ("49", "49", {"correct": 2.0}, 2.0),
        ("48", "49", {"wrong": -1.0}, -1.0),
        ("", "49", {}, 0.0),
    ],
)
def test_values(response, answer, kwargs, value):
    assert score(response, answer, **kwargs) == value


def test_a_cut_response_can_be_wrong():
    assert score("49", "49", finish_reason="length") == 1.0
    assert score("49", "49", finish_reason="length", require_stop=True) == 0.0
    assert score("49", "49", finish_reason="stop", require_stop=True) == 1.0


def test_without_an_answer_it_fails():
    with pytest.raises(ValueError, match=r"no answer"):
        score("49", None)


def test_it_says_what_it_compared():
    found = exact_match(prompt="", response=" Forty ", answer="x", extra={"finish_reason": "stop"}, ignore_case=True)
    assert found["pred"] == "forty"
