"""Short answers are compared as SQuAD does: without case, articles and punctuation."""

import json

import pytest

from mrl.rewards.qa import normalize, qa

ACCEPTED = json.dumps(["Wilhelm Conrad Röntgen", "Röntgen"])
NORMAL = {
    "The  Beatles!": "beatles",
    "a an the": "",
    "U.S.A.": "usa",
    "1,000 men": "1000 men",
    "the-end": "theend",
    "An apple, a day": "apple day",
    "Atheism": "atheism",
}
"""Answer -> its normalized form in SQuAD's evaluation script, which removes punctuation before articles."""


def score(response, answer=ACCEPTED, **kwargs):
    return qa(prompt="", response=response, answer=answer, extra={}, **kwargs)


@pytest.mark.parametrize(
    ("response", "em"),
    [
        ("It was <answer> röntgen. </answer>", 1.0),
        ("<answer>Curie</answer> no, <answer>the Röntgen</answer>", 1.0),
        ("<answer>Röntgen", 1.0),
        ("<answer>Curie</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("Röntgen", 0.0),
        ("<think><answer>Röntgen</answer></think> No idea.", 0.0),
    ],
)
def test_the_last_answer_in_tags_is_compared_with_each_accepted_one(response, em):
    assert score(response)["score"] == em == score(response)["em"]


def test_without_tags_all_of_the_response_is_compared_where_the_config_says_so():
    assert score("Röntgen", require_tags=False)["score"] == 1.0
    assert score("It was Röntgen", require_tags=False)["score"] == 0.0


def test_f1_is_the_best_match():
    found = score("<answer>Wilhelm Röntgen</answer>", metric="f1", wrong=-1.0)
    assert found["f1"] == pytest.approx(0.8) and found["score"] == pytest.approx(0.6) and found["em"] == 0.0


@pytest.mark.parametrize("answer", ["Röntgen", '["Röntgen"]', '{"target": ["Röntgen"]}'])
def test_an_answer_may_be_a_text_a_list_or_a_ground_truth_of_search_r1(answer):
    assert score("<answer>Röntgen</answer>", answer)["score"] == 1.0


@pytest.mark.parametrize("answer", [None, "", "[]", '{"target": []}', "[1]", "the"])
def test_a_row_without_accepted_answers_fails(answer):
    with pytest.raises(ValueError, match="expected a text"):
        score("<answer>1</answer>", answer)


@pytest.mark.parametrize(("text", "normal"), NORMAL.items())
def test_case_articles_punctuation_and_white_space_are_ignored(text, normal):
    assert normalize(text) == normal
