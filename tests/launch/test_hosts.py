"""launch/torchrun.sh on two hosts: addresses and interfaces are those of a network, names resolve nowhere."""

import os
import subprocess
import sys

import pytest

from tests.e2e import runs
from tests.launch.conftest import SHORT
from tests.launch.hosts import Hosts, NoRightsError
from tests.source import ROOT

pytestmark = pytest.mark.netns
TIMEOUT_S = 240


@pytest.fixture
def hosts():
    try:
        hosts = Hosts()
    except NoRightsError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield hosts
    hosts.down()


def test_two_hosts_train_to_the_same_numbers(hosts, expected, tmp_path):
    environment = {
        **os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NNODES": "2",
        "MASTER_ADDR": hosts.address(0),
    }  # fmt: skip
    words = [str(ROOT / "launch" / "torchrun.sh"), *runs.arguments(tmp_path, SHORT)]
    processes = [
        subprocess.Popen(
            hosts.command(number, *words), cwd=tmp_path, env=environment | {"NODE_RANK": str(number)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(told)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == expected
