"""`import mrl`: what scripts, notebooks and plugins import, without the command line."""

import ast
import inspect
import subprocess
import sys

import pytest
import yaml

import mrl
from tests.observed import CONFIG
from tests.source import PACKAGE, ROOT, tree_of
from tests.test_layers import modules_loaded_by

SCRIPT = """
import mrl
for folder in ("a", "b"):
    config = mrl.load_config("config.yaml", ["train.num_steps=2", f"run.output_dir={folder}"])
    mrl.train(config)
    scores = mrl.evaluate(config)
"""

AROUND = """
import json, runpy, signal, threading
heard = [signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1]
before = [signal.getsignal(number) for number in heard]
found = runpy.run_path("script.py")
print(json.dumps({
    "signals": before == [signal.getsignal(number) for number in heard],
    "threads": [thread.name for thread in threading.enumerate()],
    "scores": found["scores"],
    "callable": callable(found["mrl"].train),
}))
"""


@pytest.mark.slow
def test_five_lines_train_twice_in_one_process_and_leave_it_as_it_was(tmp_path):
    """No `__main__` guard, no command line: the process's signals stay its own, as a notebook needs."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "around.py").write_text(AROUND)
    done = subprocess.run(
        [sys.executable, "around.py"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    after = yaml.safe_load(done.stdout.splitlines()[-1])
    assert after["signals"] and after["callable"]
    assert after["threads"] == ["MainThread"]
    assert after["scores"]["checkpoint"].endswith("step-00000002") and "val/accuracy" in after["scores"]
    metrics = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    assert metrics and metrics == (tmp_path / "b" / "metrics.jsonl").read_bytes()


def test_importing_mrl_is_light():
    assert not {"torch", "megatron", "transformers", "omegaconf"} & modules_loaded_by("mrl")


def test_every_public_name_is_found_documented_and_typed():
    declared = {
        alias.asname or alias.name
        for node in ast.walk(tree_of(PACKAGE / "__init__.py"))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mrl.")
        for alias in node.names
    }
    assert declared == set(mrl.__all__) <= set(dir(mrl))
    assert all(inspect.getdoc(getattr(mrl, name)) for name in mrl.__all__)
    page = (PACKAGE / "docs" / "python.md").read_text(encoding="utf-8")
    assert [name for name in mrl.__all__ if f"`mrl.{name}" not in page] == []
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = mrl.trian


def test_train_stays_the_function_when_its_module_is_imported():
    import mrl.train

    assert inspect.isfunction(mrl.train) and mrl.train is sys.modules["mrl.train"].train


def test_a_mapping_is_a_config_and_a_mistake_is_one_sentence():
    made = mrl.load_config({"train": {"num_steps": 3}, "data": {"task": "addition"}}, "run.seed=7")
    assert (made.train.num_steps, made.run.seed) == (3, 7)
    for wrong, words in (
        ({"train": {"num_step": 3}}, "'train.num_step' is unknown. Did you mean 'train.num_steps'"),
        ({"train": {"num_steps": "three"}}, "got 'three', expected a whole number"),
        (3, "3 is not a config"),
        ("nowhere.yaml", "does not exist"),
    ):
        with pytest.raises(mrl.UserError, match=words):
            mrl.load_config(wrong)
    for start in (mrl.train, mrl.evaluate):
        with pytest.raises(mrl.UserError, match=r"Pass the result of `mrl\.load_config`"):
            start({"train": {}})
