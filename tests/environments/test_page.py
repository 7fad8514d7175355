"""The examples of mrl/docs/environments.md work as they stand there."""

import re

import pytest

from mrl.environments.base import Action, ToolCall
from tests.e2e import runs
from tests.environments.episodes import pool, replies, said, step
from tests.source import ROOT

PAGE = (ROOT / "mrl" / "docs" / "environments.md").read_text(encoding="utf-8")


@pytest.fixture
def file(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    assert len(blocks[0].splitlines()) <= 30
    path = tmp_path / "page.py"
    path.write_text("\n".join(blocks))
    return path


def test_the_game_is_played(file):
    with pool(f"{file}:Guess", {"high": 3}) as one:
        one.open("a", 0, {})
        assert "from 1 to 3" in said(replies(one, 1)["a"])[0]
        for guess in ("1", "2", "3"):
            reply = step(one, "a", guess)
            if reply.observation.done:
                break
            assert said(reply) == ["higher"]
        assert reply.observation.reward == 1.0


def test_the_config_trains_on_it(tmp_path):
    (config,) = re.findall(r"<!-- run -->\n```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "run.yaml").write_text(config)
    (tmp_path / "guess.py").write_text(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1])
    small = [
        f"run.output_dir={tmp_path}/run", f"rollout.agent.environment={tmp_path}/guess.py:Guess", "run.num_threads=1",
        "train={num_steps: 1, batch_size: 2, minibatch_size: 2}",
        "rollout={n: 2, response_length: 64}", "train.eval_interval=0", "observe={tensorboard: false, report: false}",
    ]  # fmt: skip
    rows = runs.in_pool(tmp_path, ["train", str(tmp_path / "run.yaml"), *small], 1)
    (step,) = [row for row in rows if "num_turns/mean" in row]
    assert step["episode/environment_failed_frac"] == 0 and step["episode/sampled_frac"] < 1


def test_the_tools_are_called(file):
    with pool("functions", {"tools": [f"{file}:weather"]}) as one:
        assert one.tools[0]["function"]["parameters"]["properties"]["days"]["description"] == "How many days ahead."
    with pool(f"{file}:Library") as one:
        one.open("a", 0, {})
        replies(one, 1)
        one.send("a", Action("", "", (ToolCall("lend", {"title": "Emma"}),)))
        assert said(replies(one, 1)["a"]) == ["There it is."]
        assert step(one, "a", "done").observation.reward == 1.0


def test_the_page_names_every_environment_and_format_there_is():
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    home = ROOT / "mrl" / "environments"
    for folder, word in ((home, "\nENVIRONMENT = "), (home / "formats", "\nFORMAT = ")):
        there = {path.stem for path in folder.glob("*.py") if word in path.read_text(encoding="utf-8")}
        assert there and there <= rows
