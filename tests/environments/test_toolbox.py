"""Tools that are called, and what the model is told of it."""

import pytest

from mrl.environments.base import Action, ToolCall
from mrl.environments.calculator import Calculator
from mrl.environments.functions import Functions
from mrl.environments.search import Search
from mrl.errors import UserError
from tests.environments.episodes import pool, replies

HERE = "tests.environments.functions"


def answers(environment, *calls, errors=()):
    seen = environment.step(Action("", "", tuple(ToolCall(name, arguments) for name, arguments in calls), errors))
    assert all(message["role"] == "tool" for message in seen.messages) and not seen.done and seen.reward is None
    return [message["content"] for message in seen.messages]


def calculated(expression):
    return answers(Calculator(), ("calculator", {"expression": expression}))[0]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * -3", "-9"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("7 // 2 + 7 % 4", "6"),
        ("2 ** 100", str(2**100)),
        ("0.1 + 0.2", repr(0.1 + 0.2)),
        (" 5 ", "5"),
    ],
)
def test_the_calculator_calculates(expression, value):
    assert calculated(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("9 ** 9 ** 9", "too large"),
        ("10.0 ** 400", "OverflowError"),
        ("1e308 * 10", "too large"),
        ("(0 - 8) ** 0.5", "no real number"),
        ("__import__('os')", "is no arithmetic"),
        ("'a' * 3", "is no arithmetic"),
        ("True + 1", "is no arithmetic"),
        ("1 +", "SyntaxError"),
        ("(" * 500 + "1" + ")" * 500, "Error"),
        ("1" * 2000, "1000 characters"),
        ("", "SyntaxError"),
    ],
)
def test_what_it_cannot_calculate_it_says(expression, why):
    assert calculated(expression).startswith("Error: ") and why in calculated(expression)


def test_calls_that_cannot_be_made_are_told_to_the_model():
    said = answers(
        Functions([f"{HERE}:add", f"{HERE}:later", f"{HERE}:fails"]),
        ("add", {"a": 3}),
        ("later", {"text": "x"}),
        ("fails", {"text": "how"}),
        ("ad", {}),
        ("add", {"c": 1}),
        errors=("a tool call is no JSON",),
    )
    assert said[:3] == ["4", '{"said": "x"}', "Error: RuntimeError: how"]
    assert said[3] == "Error: there is no tool 'ad'. There are: add, later, fails."
    assert said[4].startswith("Error: add: missing a required argument: 'a'")
    assert said[5] == "Error: a tool call is no JSON"


def test_a_message_without_a_call_ends_the_episode():
    assert Calculator().step(Action("It is 7.", "It is 7.")).terminated


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ([], "expected a list of paths"),
        (f"{HERE}:add", "expected a list of paths"),
        ([f"{HERE}:NUMBER"], "is a int, expected a function"),
        ([f"{HERE}:add", f"{HERE}:add"], "the same name"),
        ([f"{HERE}:none"], "has no 'none'"),
    ],
)
def test_functions_that_are_none_are_refused(tools, why):
    with pytest.raises(UserError, match=why):
        Functions(tools)


def test_the_prompt_is_told_of_the_tools():
    with pool("functions", {"tools": [f"{HERE}:add"]}) as one:
        assert [tool["function"]["name"] for tool in one.tools] == ["add"]
        assert one.tools[0]["function"]["parameters"]["required"] == ["a"]
        one.open("a", 0, {})
        assert replies(one, 1)["a"].observation.messages == ()
        one.send("a", Action("", "", (ToolCall("add", {"a": 1, "b": 2}),)))
        assert replies(one, 1)["a"].observation.messages == ({"role": "tool", "name": "add", "content": "3"},)


@pytest.fixture
def library(tmp_path):
    texts = {
        "birds/heron.txt": "The heron.\nA heron eats fish and frogs.\n",
        "birds/finch.txt": "The finch eats seeds.\n",
        "fish.txt": "Fish live in water. Fish eat fish.\n",
        "long.txt": "x" * 45,
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "notes.md").write_text("fish fish fish")
    return tmp_path


def test_a_search_finds_what_fits_best(library):
    environment = Search(str(library), num_results=2, page_chars=20)
    found = answers(environment, ("search", {"query": "Heron fish"}), ("search", {"query": "zebra"}))
    assert found[0].splitlines() == ["birds/heron.txt: The heron.", "fish.txt: Fish live in water. Fish eat fish."]
    assert found[1] == "Nothing was found."
    pages = answers(environment, ("read", {"file": "long.txt"}), ("read", {"file": "long.txt", "page": 3}))
    assert pages == ["x" * 20, "x" * 5]
    wrong = answers(environment, ("read", {"file": "long.txt", "page": 4}), ("read", {"file": "../fish.txt"}))
    assert wrong == [
        "Error: ValueError: 'long.txt' has pages 1 to 3",
        "Error: ValueError: there is no file '../fish.txt'",
    ]


def test_a_folder_without_texts_is_refused(tmp_path):
    with pytest.raises(UserError, match="0 files match"):
        Search(str(tmp_path))
    with pytest.raises(UserError, match="expected an existing folder"):
        Search(str(tmp_path / "none"))
