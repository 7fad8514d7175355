"""Tab completes commands, options, configs, keys, values and files; in a real bash."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.commands import cli
from mrl.commands.completion import SCRIPTS, candidates
from mrl.config import packaged
from mrl.config.choices import PLUGINS
from mrl.config.config import OWN_CODE, Config
from mrl.config.keys import dotted_keys
from mrl.config.registry import names
from mrl.data.public_sets.base import names as public_sets
from tests.source import ROOT


@pytest.fixture
def offered(tmp_path, monkeypatch):
    """Completes a line of words, the last one incomplete, in a folder with a config and a data file."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").touch()
    Path("rows.jsonl").touch()
    Path("data").mkdir()
    Path(".hidden.yaml").touch()
    parsers = cli.command_parsers()
    return lambda *words: candidates(parsers, words)


def test_commands(offered):
    assert offered("") == list(cli.command_parsers())
    assert offered("re") == ["rehearse", "report"]
    assert offered("nothing") == offered("nothing", "") == []


def test_configs_by_name_and_by_file(offered):
    assert offered("train", "") == [*packaged.names(), "data/", "mine.yaml"]
    assert offered("train", "mi") == ["mine.yaml"]
    assert offered("plan", "--world-size", "8", "quick") == ["quickstart"]
    assert offered("configs", "quick") == ["quickstart"]
    assert offered("configs", "quickstart", "") == []


def test_public_sets_and_pages_by_name(offered):
    assert offered("data", "gs") == ["gsm8k"] and offered("data", "") == public_sets()
    assert offered("data", "gsm8k", "") == [] and offered("data", "--max-train", "8", "gs") == ["gsm8k"]
    assert offered("docs", "rew") == ["rewards"] and len(offered("docs", "")) > 20


def test_keys_and_their_values(offered):
    assert offered("train", "mine.yaml", "") == [f"{key}=" for key in dotted_keys(Config)]
    assert offered("train", "mine.yaml", "a=1", "run.see") == ["run.seed="]
    assert offered("train", "mine.yaml", "~run.see") == ["~run.seed"]
    assert offered("train", "mine.yaml", "run.resume=") == [f"run.resume={each}" for each in ("auto", "never", "must")]
    assert offered("train", "mine.yaml", "checkpoint.async_save=f") == ["checkpoint.async_save=false"]
    assert offered("train", "mine.yaml", "rollout.name=n") == ["rollout.name=native"]
    assert offered("train", "mine.yaml", "data.train_files=r") == ["data.train_files=rows.jsonl"]
    assert offered("train", "mine.yaml", "run.seed=") == []


def test_options_and_their_values(offered):
    assert offered("train", "mine.yaml", "--") == ["--help", "--dry-run", "--world-size", "--stand-ins"]
    assert offered("launch", "--via", "") == ["torchrun", "mpirun", "sbatch"]
    assert offered("launch", "--via", "sbatch", "mine.yaml", "--mode", "s") == ["srun"]
    assert offered("convert", "hf") == ["hf-to-megatron", "hf-to-trtllm", "hf-to-hf"]
    assert offered("completion", "z") == ["zsh"]


def test_names_of_plugins_are_those_of_the_folders():
    assert set(PLUGINS) | {"data.task", "data.order_by", "observe.callbacks[*].name"} == set(OWN_CODE)
    assert all(names(folder) for folder in PLUGINS.values())


def in_bash(line: str, folder: Path) -> list[str]:
    """Returns the completions that readline offers at the end of `line`."""
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / "mrl"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m mrl "$@"\n')
    program.chmod(0o755)
    script = """PATH="$1:$PATH"; source <(mrl completion bash); COMP_LINE=$2 COMP_POINT=${#2}
        _mrl_complete 2>/dev/null; printf '%s\\n' "${COMPREPLY[@]}"; complete -p mrl"""
    command = ["bash", "--norc", "-c", script, "bash", str(folder / "bin"), line]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    *found, registered = done.stdout.splitlines()
    assert "-F _mrl_complete mrl" in registered
    return [each for each in found if each]


@pytest.mark.slow
def test_bash_replaces_only_what_follows_the_equals_sign(tmp_path):
    assert in_bash("mrl tr", tmp_path) == ["train"]
    assert in_bash("mrl train quickstart rollout.na", tmp_path) == ["rollout.name="]
    assert in_bash("mrl train quickstart run.device=c", tmp_path) == ["cpu", "cuda"]
    assert in_bash("mrl launch --via ", tmp_path) == ["torchrun", "mpirun", "sbatch"]
    assert in_bash("mrl train quickstart run.seed=", tmp_path) == []


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_valid(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    subprocess.run([shell, "-n", "/dev/stdin"], input=text, text=True, check=True)
