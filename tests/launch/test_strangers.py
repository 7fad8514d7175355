"""A process that is none of the job's, at each of its ports: nothing that it sends runs, and one message at most."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from tests import warm
from tests.e2e import runs
from tests.launch import strangers
from tests.launch.conftest import SHORT
from tests.source import ROOT

pytestmark = pytest.mark.slow

TIMEOUT_S = 240
KEYS = ("torch.rendezvous.mrl", "watchdog/end", "watchdog/alarm")
OVERRIDES = (*SHORT, "train.warm_start.num_steps=0", "algorithm.name=tests.launch.strangers:Held",
    "run.collective_timeout_s=40", "run.heartbeat_timeout_s=20")  # fmt: skip


class HeldJob:
    """Two ranks under torchrun.sh that wait in their third update until `go`."""

    def __init__(self, folder, restarts):
        self.folder, self.until = folder, folder / "go"
        self.output = folder / "output.txt"
        self.port = runs.free_port()
        variables = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT),
            "PYTHON_EXEC": warm.python(), "NPROC_PER_NODE": "2", "MASTER_PORT": str(self.port),
            "MAX_RESTARTS": str(restarts), strangers.HELD_UNTIL: str(self.until), "TMPDIR": str(folder),
        }  # fmt: skip
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [str(ROOT / "launch" / "torchrun.sh"), *runs.arguments(folder, OVERRIDES)],
                cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def __enter__(self):
        deadline = time.monotonic() + TIMEOUT_S
        while len(list(self.folder.glob("go-*"))) < 2:
            assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)
        return self

    def __exit__(self, *error):
        for process in self.processes():
            process.kill()

    def processes(self):
        if self.process.poll() is not None:
            return []
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True), *warm.processes()]

    def end(self):
        self.until.touch()
        return self.process.wait(TIMEOUT_S), self.output.read_text()


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_of_one_host_listens_on_loopback_alone_and_believes_no_stranger(restarts, tmp_path):
    mark, end = tmp_path / "ran", json.dumps({"text": "all is well", "status": 0, "speaker": 0})
    with HeldJob(tmp_path, restarts) as job:
        sockets = strangers.listening(job.processes())
        assert {address for address, _, _ in sockets} == {"127.0.0.1"}
        ports = {port for _, port, _ in sockets}
        assert job.port in ports
        for port in ports:
            strangers.speak_garbage(port)
        if restarts:
            assert strangers.write_payloads(ports, mark, KEYS) > 0
            time.sleep(2 * strangers.WAIT_S)  # the launchers read their state every 5 s
        else:
            strangers.write_for_watchdog(ports, {"end": end, "alarm": "0"})
        status, told = job.end()
    assert not mark.exists() and "all is well" not in told, told
    done = (tmp_path / "run" / "checkpoints" / "step-00000002").exists()
    assert (status == 0 and done) or (status == 70 and told.count("mrl: error: ") == 1), told
