"""Code of a user's own: found beside the config and in the working folder, however `mrl` starts, and on a resume."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.commands.cli import main
from mrl.config import registry
from mrl.config.config import load, to_yaml
from mrl.config.paths import expand_path
from mrl.config.user_code import label, make_absolute
from mrl.errors import UserError
from tests.e2e import runs
from tests.source import ROOT

TASK = """
from mrl.data.synthetic_tasks import Addition
class Sums(Addition):
    def __init__(self, **kwargs):
        super().__init__(max_value=9, num_val=4)
"""
ALGORITHM = "from mrl.algorithms.grpo import ALGORITHM as Mine"
ENGINE = "from mrl.engines.native import ENGINE as Mine"
REWARD = """
import beside
def score(*, prompt, response, answer, extra):
    return beside.ONE
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A config's folder and a working folder, none of them on a path of Python's."""
    for name in ("configs", "working"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "working")
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", [folder for folder in before if folder not in ("", str(tmp_path / "working"))])
    return tmp_path


def names(config):
    return [
        config.rollout.name,
        config.algorithm.name,
        config.data.task,
        *(one.name for one in config.reward.functions),
    ]


@pytest.mark.parametrize("place", ["configs", "working"])
@pytest.mark.parametrize("form", ["own/{0}.py:Mine", "own.{0}.Mine", "{0}:Mine"])
def test_each_part_may_lie_in_a_file_beside_the_config_or_in_the_working_folder(project, place, form):
    parts = {"a_task": TASK.replace("Sums", "Mine"), "an_algorithm": ALGORITHM, "an_engine": ENGINE, "a_reward": REWARD}
    folder = project / place / ("own" if "own" in form else "")
    folder.mkdir(exist_ok=True)
    for name, text in parts.items():
        (folder / f"{name}.py").write_text(text)
    paths = {name: form.format(name) for name in parts}
    overrides = [f"rollout.name={paths['an_engine']}", f"algorithm.name={paths['an_algorithm']}"]
    overrides += [f"data.task={paths['a_task']}", f"reward.functions=[{{name: '{paths['a_reward']}'}}, {{name: math}}]"]
    (project / "configs" / "run.yaml").write_text("run: {seed: 1}\n")
    config = load(project / "configs" / "run.yaml", overrides)
    expected = [f"{folder / name}.py:Mine" for name in ("an_engine", "an_algorithm", "a_task", "a_reward")]
    assert names(config) == [*expected, "math"]
    for kind, name in zip(("engines", "algorithms", "data"), names(config)[:3], strict=True):
        assert isinstance(registry.find(kind, name, ""), type)
    (project / "resolved.yaml").write_text(to_yaml(config))
    os.chdir(project)
    assert load(project / "resolved.yaml") == config


def test_a_file_beside_the_config_comes_before_one_of_the_working_folder_and_home_is_known(project, monkeypatch):
    for folder in ("configs", "working"):
        (project / folder / "same.py").write_text("")
    folders = [project / "configs", Path()]
    assert make_absolute("same.py:f", folders) == f"{project}/configs/same.py:f"
    monkeypatch.setenv("HOME", str(project / "working"))
    assert make_absolute(expand_path("~/same.py:f"), folders) == f"{project}/working/same.py:f"
    assert make_absolute("json.decoder:JSONDecoder", folders) == "json.decoder:JSONDecoder"


def test_files_of_one_name_and_of_a_name_that_python_has_are_told_apart(project):
    found = []
    for folder in ("configs", "working"):
        for name in ("same", "random"):
            (project / folder / f"{name}.py").write_text(f"WHERE = '{folder}'")
            found.append(registry.find("rewards", f"{project / folder / name}.py:WHERE", ""))
    assert found == ["configs", "configs", "working", "working"]
    import random

    assert not hasattr(random, "WHERE")


def test_a_file_in_a_package_imports_its_neighbours(project):
    package = project / "configs" / "own_package_of_rewards" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "a.py").write_text("from .b import VALUE\nfrom .. import inner")
    (package / "b.py").write_text("VALUE = 3")
    assert registry.find("rewards", f"{package}/a.py:VALUE", "") == 3


def test_the_label_of_a_path_does_not_depend_on_its_folder():
    assert label("/home/me/tasks.py:Sums") == label("tasks.py:Sums") == "tasks:Sums"
    assert [label(name) for name in ("addition", "package.tasks:Sums")] == ["addition", "package.tasks:Sums"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.py:f", r"'nothing.py:f': there is no file 'nothing.py' in .*configs or .*working"),
        ("/nowhere/at/all.py:f", "there is no file '/nowhere/at/all.py'"),
        ("raises.py", r"names a file but no object in it: write 'raises.py:object'"),
        (":f", "is not a path to code"),
        ("raises.py:", "is not a path to code"),
        ("raises.py:f", r"does not import: ZeroDivisionError: division by zero \(.*raises.py, line 2\)"),
        ("broken.py:f", r"does not import: SyntaxError: .*broken.py, line 1"),
        ("needs.py:f", r"'not_here_at_all'; install not_here_at_all in .* \(.*needs.py, line 1\)"),
        ("ends.py:f", "does not import: it raises SystemExit: 3"),
        ("empty.py:f", "has no 'f'"),
        ("not_here_at_all:f", "No module named 'not_here_at_all'. Write it as .*path/to/file.py"),
    ],
)
def test_code_that_cannot_be_used_is_refused_in_one_message(project, name, message):
    texts = {"raises": "\n1 / 0", "broken": "def (", "needs": "import not_here_at_all", "empty": "", "ends": "exit(3)"}
    for file, text in texts.items():
        (project / "configs" / f"{file}.py").write_text(text)
    with pytest.raises(UserError, match=message):
        registry.find("data", make_absolute(name, [project / "configs", Path()]), "")


@pytest.mark.slow
def test_a_run_of_the_console_script_and_its_resume_from_the_run_folder(project, monkeypatch):
    """Started outside the config's folder; the console script, unlike `python -m`, knows no working folder."""
    (project / "configs" / "my_rewards.py").write_text(REWARD)
    (project / "configs" / "beside.py").write_text("ONE = 1.0")
    (project / "working" / "my_tasks.py").write_text(TASK)
    small = ["~train.warm_start", "rollout.n=2", "train.batch_size=2", "train.minibatch_size=1", "data.task_kwargs={}"]
    own = ["reward.functions=[{name: 'my_rewards:score'}]", "data.task=my_tasks.py:Sums"]
    words = runs.arguments(project / "configs", [*small, *own, "observe.console=off", f"run.output_dir={project}/run"])
    program = Path(sys.executable).with_name("mrl")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([program, *words, "train.num_steps=1"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(project)
    assert main(["train", str(project / "run" / "config.yaml"), "train.num_steps=2"]) == 0
    rows = runs.metrics(project)
    assert [row["reward/score/mean"] for row in rows if "reward/score/mean" in row] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("my_rewadrs.py:score", "my_rewards.py"),
        ("configs/my_reward.py:score", "my_rewards.py"),
        ("my_rewards.py:scroe", "score"),
        ("my_rewards.py:Sorer", "Scorer"),
        ("my_modle:score", "my_module"),
        ("my_rewards.py:zzzzzz", None),
        ("my_rewards.py:_hidde", None),
        ("elsewhere_entirely.py:score", None),
    ],
)
def test_a_mistyped_file_or_name_in_it_is_offered_the_nearest(project, monkeypatch, name, meant):
    (project / "configs" / "my_rewards.py").write_text("def score():\n    pass\n\n\nclass Scorer:\n    _hidden = 1\n")
    (project / "working" / "my_module.py").write_text("def score():\n    pass\n")
    monkeypatch.chdir(project / "working")
    with pytest.raises(UserError) as caught:
        registry.find("rewards", make_absolute(name, [project / "configs", project, Path()]), "")
    said = str(caught.value)
    assert ("Did you mean" in said) == (meant is not None) and (meant is None or f"{meant}'?" in said)


@pytest.mark.parametrize(
    ("folder", "attribute"),
    [
        ("algorithms", "ALGORITHM"),
        ("engines", "CAPABILITIES"),
        ("environments", "ENVIRONMENT"),
        ("models", "FAMILY"),
        ("observability.loggers", "LOGGER"),
        ("rewards", "REWARD"),
    ],
)
def test_every_name_that_a_folder_offers_is_a_plugin(folder, attribute):
    for name in registry.names(folder):
        assert registry.find(folder, name, attribute) is not None, name


@pytest.mark.parametrize(
    "override",
    [
        "rollout.name=own.py:Own",
        "rollout.agent.environment=own.py:Own",
        "algorithm.name=own.py:Own",
        "reward.functions=[{name: 'own.py:Own'}]",
        "data.task=own.py:Own",
        "observe.loggers=[{name: 'own.py:Own'}]",
    ],
)
def test_code_next_to_the_config_is_found_from_any_folder(override, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/own.py").write_text("Own = object()")
    (tmp_path / "run/config.yaml").write_text("train: {num_steps: 1}\n")
    monkeypatch.chdir(tmp_path)
    assert f"{tmp_path}/run/own.py:Own" in to_yaml(load("run/config.yaml", [override]))
