import json
import math
import re

import pytest

from mrl.data.synthetic_tasks import Addition, Calculating, Guessing, Task, make_task
from mrl.errors import UserError


class Echo(Task):
    """A task of a user's own."""

    num_train, num_val = 5, 2

    def train_row(self, index):
        return {"prompt": f"say {index}", "answer": index}

    def val_row(self, index):
        return {"prompt": f"say {100 + index}", "answer": 100 + index}


def terms_of(row):
    return tuple(int(term) for term in re.fullmatch(r"<(\d+(?:\+\d+)*)>", row["prompt"]).group(1).split("+"))


def test_rows_are_sums_of_the_asked_shape():
    task = Addition(min_terms=2, max_terms=4, max_value=30, num_train=500, num_val=50)
    for row in [task.train_row(index) for index in range(500)] + [task.val_row(index) for index in range(50)]:
        terms = terms_of(row)
        assert 2 <= len(terms) <= 4
        assert all(0 <= term <= 30 for term in terms)
        assert row["answer"] == str(sum(terms))
        assert row["num_terms"] == len(terms)


def test_every_number_of_terms_and_every_value_occurs():
    task = Addition(min_terms=2, max_terms=4, max_value=9)
    rows = [terms_of(task.train_row(index)) for index in range(3000)]
    assert all(800 < sum(len(terms) == count for terms in rows) < 1200 for count in (2, 3, 4))
    assert {term for terms in rows for term in terms} == set(range(10))


def test_held_out_sums_never_appear_in_training_in_any_order():
    # 441 ordered pairs only: 20,000 training rows visit every pair that is not held out.
    task = Addition(min_terms=2, max_terms=2, max_value=20, num_train=20_000, num_val=30)
    held_out = [terms_of(task.val_row(index)) for index in range(task.num_val)]
    trained = {tuple(sorted(terms_of(task.train_row(index)))) for index in range(task.num_train)}
    assert len(set(held_out)) == 30
    assert not trained & {tuple(sorted(terms)) for terms in held_out}
    pairs = {(low, high) for high in range(21) for low in range(high + 1)}
    assert len(trained) > 0.8 * len(pairs)


@pytest.mark.parametrize(("options", "too_high"), [({}, 1), ({"wrong_by": 3}, 3)])
def test_wrong_responses_are_too_high_in_the_asked_part_of_the_training_rows(options, too_high):
    task = make_task("addition", {"wrong_frac": 0.25, **options})
    off = [int(row["response"]) - int(row["answer"]) for row in map(task.train_row, range(2000))]
    assert set(off) == {0, too_high}
    assert 0.2 < sum(value != 0 for value in off) / len(off) < 0.3
    assert all(row["response"] == row["answer"] for row in map(task.val_row, range(50)))


def test_rows_depend_on_seed_and_index_alone():
    first, again, other = Addition(seed=3), Addition(seed=3), Addition(seed=4)
    assert [first.train_row(index) for index in (9, 2, 9)] == [again.train_row(index) for index in (9, 2, 9)]
    assert [first.train_row(index) for index in range(20)] != [other.train_row(index) for index in range(20)]
    assert [first.val_row(index) for index in range(20)] != [other.val_row(index) for index in range(20)]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_terms": 1}, "min_terms=2 is above max_terms=1"),
        ({"max_value": 2.5}, "max_value is 2.5"),
        ({"num_train": 0}, "num_train is 0"),
        ({"wrong_by": 0}, "wrong_by is 0"),
        ({"num_val": "9"}, "num_val is '9'"),
        ({"held_out_frac": 1.0}, "held_out_frac is 1.0"),
        ({"max_value": 2, "max_terms": 2, "num_val": 9}, "different held-out sums were found"),
        ({"max_value": 2, "max_terms": 2, "num_val": 50}, "there are only 9 different sums"),
        ({"held_out_frac": 1e-15}, "expected a number from 0.01 to 0.9"),
        ({"wrong_frac": "x"}, "wrong_frac is 'x'"),
        ({"max_terms": "x"}, "max_terms is 'x'"),
        ({"max_valeu": 2}, "takes: min_terms, max_terms, max_value"),
    ],
)
def test_bad_arguments_are_refused(kwargs, message):
    with pytest.raises(UserError, match=message):
        make_task("addition", kwargs)


def test_a_task_of_the_users_own_is_found_by_its_path():
    assert make_task("tests.data.test_synthetic_tasks:Echo", {}).train_row(3) == {"prompt": "say 3", "answer": 3}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adition", "unknown 'adition'. Known: addition"),
        ("nowhere.tasks:Echo", "does not import"),
        ("builtins:dict", "expected a subclass of mrl.data.synthetic_tasks.Task"),
        ("mrl.data.synthetic_tasks:Task", "'mrl.data.synthetic_tasks:Task' does not define train_row, val_row"),
    ],
)
def test_a_task_that_is_none_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        make_task(name, {})


def plays(game, low, high):
    """Whether each answer of a game could be true of one number."""
    assert [message["role"] for message in game] == (["assistant", "user"] * len(game))[: len(game)]
    for guess, answer in zip(game[::2], game[1::2], strict=False):
        guess = int(guess["content"])
        low, high = (max(low, guess + 1), high) if answer["content"] == "higher" else (low, min(high, guess - 1))
    return low <= int(game[-1]["content"]) <= high or low <= high


def test_games_can_be_true_and_some_halve_what_is_left():
    task = Guessing(low=1, high=15, num_guesses=4, right_frac=0.5)
    games = [task.train_row(index)["response"] for index in range(400)]
    assert {len(game) for game in games} == {1, 3, 5, 7}
    assert all(plays(game, 1, 15) for game in games)
    assert 120 < sum(game[0]["content"] == "8" for game in games) < 280
    assert {task.train_row(0)["prompt"], task.val_row(0)["prompt"]} == {"<1-15>"}
    for game in (
        Guessing(low=1, high=3, num_guesses=2, right_frac=1.0).train_row(index)["response"] for index in range(9)
    ):
        assert [message["content"] for message in game] in (["2"], ["2", "higher", "3"], ["2", "lower", "1"])
    assert games == [task.train_row(index)["response"] for index in range(400)]


def test_calculations_are_right_and_some_responses_call():
    task = Calculating(num_terms=3, calls_frac=0.5, num_val=20)
    rows = [task.train_row(index) for index in range(300)]
    for row in [*rows, *(task.val_row(index) for index in range(20))]:
        question = re.fullmatch(r"<(\d([+*]\d){2})>", row["prompt"])[1]
        assert row["answer"] == str(sum(math.prod(map(int, part.split("*"))) for part in question.split("+")))
        if len(said := row.get("response", ())) > 1:
            assert [message["role"] for message in said] == ["assistant", "tool", "assistant"]
            call = re.fullmatch(r"<tool_call>(.*)</tool_call>", said[0]["content"])[1]
            assert json.loads(call) == {"name": "calculator", "arguments": {"expression": question}}
            assert said[1]["content"] == said[2]["content"] == row["answer"]
    assert 100 < sum(len(row["response"]) > 1 for row in rows) < 200


def test_held_out_calculations_are_all_different_and_never_trained():
    task = Calculating(num_terms=2, num_val=12, held_out_frac=0.2)
    held_out = {task.val_row(index)["prompt"] for index in range(12)}
    assert len(held_out) == 12
    trained = {task.train_row(index)["prompt"] for index in range(3000)}
    assert not held_out & trained and len(trained) > 0.7 * 162
    with pytest.raises(UserError, match=r"num_val is 80, but only \d+ different held-out questions"):
        Calculating(num_terms=2, num_val=80)


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("guessing", {"low": 5, "high": 5}, "data.task_kwargs.high is 5"),
        ("guessing", {"right_frac": 2}, "data.task_kwargs.right_frac is 2"),
        ("calculating", {"num_terms": 1}, "data.task_kwargs.num_terms is 1"),
    ],
)
def test_episodes_of_no_sense_are_refused(name, kwargs, said):
    with pytest.raises(UserError, match=re.escape(said)):
        make_task(name, kwargs)
