"""What was written for other libraries is an environment as it is."""

import inspect

import pytest
import yaml

from mrl.environments import _factory
from mrl.environments.base import Action, ToolCall
from mrl.environments.verl_tools import verl_tools
from mrl.errors import UserError
from tests.environments.episodes import pool, replies, said
from tests.environments.foreign import Counter

HERE = "tests.environments.foreign"


def find_environment(name, kwargs):
    return _factory.find_environment(name, kwargs)[0]


def call(name, **arguments):
    return Action("", "", (ToolCall(name, arguments),))


def test_an_object_of_trl_in_a_worker():
    with pool(f"{HERE}:Counter") as one:
        assert [tool["function"]["name"] for tool in one.tools] == ["add"]
        one.open("a", 0, {"prompt": "p", "goal": 5, "more": 1})
        assert said(replies(one, 1)["a"]) == ["Count to 5."]
        for by, count in ((2, "2"), (3, "5")):
            one.send("a", call("add", by=by))
            assert said(replies(one, 1)["a"]) == [count]
        one.send("a", Action("done"))
        last = replies(one, 1)["a"].observation
        assert last.terminated and last.reward == 1.0


def test_its_tools_are_those_that_trl_finds():
    """The rule of TRL's GRPOTrainer, written down here: no `trl` is needed to use its objects."""
    theirs = [
        name
        for name, _ in inspect.getmembers(Counter, predicate=inspect.isfunction)
        if name not in ("reset", "get_reward") and not name.startswith("_")
    ]
    assert [tool.__name__ for tool in find_environment(f"{HERE}:Counter", {})().tools] == theirs


def test_gymnasium_s_five_values():
    walk = find_environment(f"{HERE}:Walk", {"length": 4})()
    first = walk.reset(3, {"name": "n"})
    assert [message["content"] for message in first.messages] == ["start 3 n"] and first.info == {"place": 0.0}
    seen = walk.step(Action("xx"))
    assert seen.messages[0]["content"] == '{"place": 2}' and seen.reward == -1.0
    assert (seen.terminated, seen.truncated, seen.info) == (False, False, {"place": 2.0})
    assert walk.step(Action("xx")).terminated and walk.step(Action("x" * 9)).truncated


def test_openenv_s_results_and_typed_actions():
    echo = find_environment(f"{HERE}:Echo", {})()
    assert echo.reset(0, {}).messages[0]["content"] == "ready"
    seen = echo.step(Action("hello"))
    assert (seen.messages[0]["content"], seen.reward, seen.done) == ("echo hello", 0.5, False)
    assert echo.step(Action("end")).done


def schema(name):
    parameters = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    return {"type": "function", "function": {"name": name, "description": "Checks.", "parameters": parameters}}


def listed():
    tool = {"class_name": f"{HERE}.BaseTool", "config": {"says": "it is"}, "tool_schema": schema("check")}
    return [tool, tool | {"tool_schema": schema("again")}]


ROW = {"extra_info": {"tools_kwargs": {name: {"create_kwargs": {"ground_truth": "4"}} for name in ("check", "again")}}}


@pytest.mark.parametrize("reward", ["none", "execute", "calc_reward"])
def test_tools_of_verl(tmp_path, reward):
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": listed()}))
    tools = verl_tools(tool_config_path=str(file), reward=reward)
    assert tools.tools == [schema("check"), schema("again")]
    tools.reset(0, ROW)
    seen = tools.step(call("check", answer="4"))
    assert seen.messages == ({"role": "tool", "name": "check", "content": "it is True"},)
    assert seen.info == {"tool_reward": 0.25} and seen.reward == (0.25 if reward == "execute" else None)
    assert tools.step(call("other")).messages[0]["content"].startswith("Error: there is no tool 'other'")
    last = tools.step(Action("4"))
    assert last.terminated and last.info == {"calc_reward/check": 1.0, "calc_reward/again": 1.0}
    assert last.reward == (2.0 if reward == "calc_reward" else None)
    tools.close()


def test_tools_of_verl_in_a_worker():
    with pool("verl_tools", {"tools": listed()}) as one:
        one.open("a", 0, ROW)
        one.open("b", 0, {"extra_info": {}})
        found = replies(one, 2)
        assert said(found["a"]) == []
        assert found["b"].failure.cause == "error" and "ground_truth" in found["b"].failure.message


@pytest.mark.parametrize(
    ("name", "kwargs", "why"),
    [
        (f"{HERE}:Neither", {}, "expected an Environment, or an object with reset and step"),
        ("verl_tools", {}, "expected tools, each with 'class_name'"),
        ("verl_tools", {"tool_config_path": "/nowhere.yaml"}, "cannot read 'tools' from"),
        ("verl_tools", {"tools": listed(), "reward": "all"}, "expected none, execute or calc_reward"),
    ],
)
def test_what_has_no_known_shape_is_refused(name, kwargs, why):
    with pytest.raises(UserError, match=why):
        find_environment(name, kwargs)()
