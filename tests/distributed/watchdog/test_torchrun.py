"""The launcher adds nothing to a message that a rank has printed, and hides nothing else."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.e2e.runs import free_port
from tests.own_tasks import DEFECT
from tests.source import ROOT

pytestmark = pytest.mark.slow

CONFIG = """
run: {output_dir: run, num_threads: 1}
model: {preset: qwen2_tiny, tokenizer: "char:0123456789<>+#", dtype: float32}
data: {task: "own_task:Task"}
train: {num_steps: 1}
rollout: {prompt_length: 16, response_length: 8}
"""
TIMEOUT_S = 120


def start(folder: Path, *overrides: str, task: str = "", port: int = 0) -> subprocess.Popen[str]:
    folder.joinpath("c.yaml").write_text(CONFIG)
    folder.joinpath("own_task.py").write_text(task)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "NPROC_PER_NODE": "1", "MASTER_PORT": str(port or free_port()),
        "TMPDIR": str(folder), "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "PYTHON_EXEC": warm.python(),  # the rank's
    }  # fmt: skip
    command = [str(ROOT / "launch" / "torchrun.sh"), "train", "c.yaml", *overrides]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def left_by_torchrun(folder: Path) -> list[Path]:
    return list(folder.glob("torchelastic_*"))


def test_a_mistake_is_one_message_and_status_2(tmp_path):
    process = start(tmp_path, "train.num_step=3")
    _, told = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert told.count("mrl: error: config key 'train.num_step' is unknown") == 1
    assert "Traceback" not in told and "FAILED" not in told
    assert left_by_torchrun(tmp_path) == []


def test_a_defect_keeps_the_launchers_table(tmp_path):
    process = start(tmp_path, task=DEFECT)
    _, told = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "ZeroDivisionError" in told and "Root Cause" in told
    assert left_by_torchrun(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_a_signal_to_the_launcher_reaches_the_rank_whose_status_it_takes(number, tmp_path, request):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, of all that the tests start, too
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    process = start(tmp_path, task="import pathlib, time\npathlib.Path('up').touch()\ntime.sleep(100)\n")
    deadline = time.monotonic() + TIMEOUT_S
    while not (tmp_path / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, told = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 75
    said = f"mrl: ended by {number.name}.\nThere is no checkpoint yet, in run. Start again with: "
    assert told.partition(said)[2].splitlines()[0].endswith("-m mrl train c.yaml")
    assert "Traceback" not in told
    assert left_by_torchrun(tmp_path) == []


def test_a_port_in_use_is_told_with_status_2(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        process = start(tmp_path, port=port)
        _, told = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    assert f"cannot listen on port {port} for the other ranks: Address already in use." in told
    assert told.count("mrl: error: ") == 1 and "Traceback" not in told
