"""The scripts of mrl/docs/python.md, each at most ten lines, run as they stand there."""

import os
import re
import subprocess
import sys

import pytest
import yaml

import mrl
from mrl.algorithms.base import resolve
from mrl.config.config import AlgorithmConfig
from mrl.errors import UserError
from tests.e2e import runs
from tests.source import PACKAGE, ROOT

PAGE = (PACKAGE / "docs" / "python.md").read_text(encoding="utf-8")
SCRIPTS = dict(re.findall(r"<!-- ten lines: (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
(CONFIG,) = re.findall(r"<!-- run.yaml -->\n```yaml\n(.*?)```", PAGE, re.DOTALL)
(ENGINE,) = re.findall(r"<!-- engine -->\n```python\n(.*?)```", PAGE, re.DOTALL)
(ALGORITHM,) = re.findall(r"<!-- algorithm -->\n```python\n(.*?)```", PAGE, re.DOTALL)


def test_there_is_one_for_each_kind_and_none_is_longer():
    assert SCRIPTS.keys() == {"reward", "environment", "algorithm", "logger", "callback"}
    lengths = {kind: len([line for line in text.splitlines() if line.strip()]) for kind, text in SCRIPTS.items()}
    assert max(lengths.values()) <= 10, lengths


def write_config(folder):
    """The page's config with two steps."""
    values = yaml.safe_load(CONFIG)
    values["train"] |= {"num_steps": 2, "eval_interval": 1}
    values["run"] = {"num_threads": 1, "output_dir": "run"}
    values["observe"] = {"console": "plain", "tensorboard": False, "report": False}
    (folder / "run.yaml").write_text(yaml.safe_dump(values))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_trains(kind, tmp_path):
    write_config(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPTS[kind])
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "script.py"], cwd=tmp_path, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=runs.TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for row in runs.metrics(tmp_path) if row["phase"] == "train"]
    assert [row["step"] for row in rows] == [0, 1, 2]
    last, lines = rows[-1], done.stdout.splitlines()
    seen = {
        "reward": {"reward/short/mean", "reward/exact_match/mean"} <= last.keys() and "step-00000002" in lines[-1],
        "environment": last.get("num_turns/mean", 0) >= 1 and "reward/environment/mean" in last,
        "algorithm": abs(last["critic/advantages/mean"]) < 1e-6,
        "logger": f"train 2 {last['critic/score/mean']}" in lines,
        "callback": lines[-1] == "2 ",
    }
    assert seen[kind]


def test_the_algorithm_written_from_the_base_class_trains(tmp_path):
    write_config(tmp_path)
    (tmp_path / "reinforce.py").write_text(ALGORITHM)
    words = ["train", f"{tmp_path}/run.yaml", f"run.output_dir={tmp_path}/run"]
    rows = runs.in_pool(tmp_path, [*words, f"algorithm.name={tmp_path}/reinforce.py:Reinforce"], 1)
    assert rows[-1]["step"] == 2 and "actor/entropy" not in rows[-1] and "actor/grad_norm" in rows[-1]
    for setting in ({"entropy_coef": 0.1}, {"kl_in": "loss"}, {"clip_low": 0.1}, {"policy_loss": "gspo"}):
        with pytest.raises(UserError, match=f"algorithm.{next(iter(setting))}"):
            resolve(AlgorithmConfig(name=f"{tmp_path}/reinforce.py:Reinforce", **setting))


def test_every_name_of_mrl_on_the_pages_exists():
    import mrl

    pages = [*(PACKAGE / "docs").glob("*.md"), ROOT / "README.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    blocks = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    named = set(re.findall(r"\bmrl\.([A-Za-z_]+)", blocks)) | set(re.findall(r"`mrl\.([A-Z]\w+)", text))
    for names in re.findall(r"^from mrl import (.+)$", blocks, re.MULTILINE):
        named |= {name.strip() for name in names.split(",")}
    folders = {path.stem for path in PACKAGE.iterdir()}
    assert {"Environment", "Observation", "Callback"} <= named
    assert {name for name in named if name not in mrl.__all__ and name not in folders} == set()


@pytest.mark.slow
def test_the_engine_of_the_page_samples_what_the_actor_computes(tmp_path):
    """Two implementations of the same model, Megatron's and transformers', give each token the same probability."""
    (tmp_path / "hf_engine.py").write_text(ENGINE)
    config = mrl.load_config(
        "quickstart",
        [
            f"rollout.name={tmp_path}/hf_engine.py:Transformers", f"run.output_dir={tmp_path}/run", "run.num_threads=1",
            "train={num_steps: 2, batch_size: 4, minibatch_size: 4}", "train.warm_start.num_steps=0", "rollout.n=4",
            "data.task_kwargs.num_val=4", "observe={console: off, tensorboard: false, report: false}",
        ],
    )  # fmt: skip
    mrl.train(config)
    rows = [row for row in runs.metrics(tmp_path) if row["phase"] == "train"]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert max(row["training/rollout_probs_diff_max"] for row in rows[1:]) < 1e-4
