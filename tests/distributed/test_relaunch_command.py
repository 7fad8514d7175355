"""The line that starts a job again is what was typed, as far as it can be seen."""

import shlex
import subprocess
import sys

import pytest

from mrl.distributed import relaunch_command
from tests.source import ROOT

WORDS = ["train", "a b.yaml", "reward.functions=[{name: 'x'}]"]
TYPED = f"NPROC=2 launch/mpirun.sh {shlex.join(WORDS)}"
RANK = "import sys; from mrl.distributed.relaunch_command import started_by; print(started_by(sys.argv[1:]))"
LAUNCHER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {RANK!r}, *sys.argv[1:]], check=True)"
OF_A_RANK = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def test_a_launcher_is_an_ancestor_whose_line_ends_in_the_words():
    line = [sys.executable, "-c", LAUNCHER, *WORDS]
    done = subprocess.run(line, cwd=ROOT, env={**OF_A_RANK, "PATH": ""}, capture_output=True, text=True, check=True)
    assert shlex.split(done.stdout) == line


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({}, None),
        ({relaunch_command.STARTED_BY: f"{TYPED} "}, TYPED),
        ({"SLURM_JOB_ID": "1"}, None),
        ({relaunch_command.STARTED_BY: "launch/mpirun.sh train another.yaml"}, None),
        ({relaunch_command.STARTED_BY: "launch/mpirun.sh 'open"}, None),
    ],
)
def test_a_script_says_what_was_typed(variables, line, monkeypatch):
    for name, value in {**OF_A_RANK, **variables}.items():
        monkeypatch.setenv(name, value)
    assert relaunch_command.started_by(WORDS) == line


def test_programs_go_by_their_name_where_a_shell_finds_them(monkeypatch):
    monkeypatch.setattr(relaunch_command.shutil, "which", lambda name: f"/venv/bin/{name}")
    words = ["train", "a.yaml"]
    typed = ["/venv/bin/python3", "/venv/bin/torchrun", "--nproc-per-node", "2", "-m", "mrl", *words]
    assert relaunch_command._without_suffix(typed, words) == ["torchrun", "--nproc-per-node", "2", "-m", "mrl"]
    assert relaunch_command._without_suffix(["python", "-m", "mrl", *words], words) == ["python", "-m", "mrl"]
    assert relaunch_command._without_suffix(["python", "-m", "mrl", *words], ["plan", "a.yaml"]) == []
