"""`mrl doctor` started as a job is: by torchrun and mpirun on one host, and on two hosts that do not fit each other."""

import json
import os
import subprocess
import sys

import pytest

from tests import warm
from tests.commands.doctor.test_doctor import QUICK
from tests.commands.doctor.test_versions import distribution
from tests.e2e import runs
from tests.launch.hosts import Hosts, NoRightsError
from tests.launch.test_mpirun import mpirun
from tests.source import ROOT

pytestmark = pytest.mark.slow

TIMEOUT_S = 240
PATHS = os.pathsep.join((str(ROOT), QUICK))
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}


def by_topic(findings):
    return {(each["topic"], each["level"]): each for each in findings}


def test_two_ranks_of_torchrun(tmp_path):
    variables = {"NPROC_PER_NODE": "2", "MASTER_PORT": str(runs.free_port()), "PYTHON_EXEC": warm.python()}
    _, config, output = runs.arguments(tmp_path)
    done = subprocess.run(
        [str(ROOT / "launch" / "torchrun.sh"), "doctor", config, output, "--json"], cwd=tmp_path,
        env=ENVIRONMENT | variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert [*told["hosts"].values()] == [[0, 1]]
    found = by_topic(told["findings"])
    assert found["launcher", "ok"]["found"].startswith("torchrun: 2 ranks on 1 host(s) met at 127.0.0.1:")
    assert "exact on 2 ranks" in found["all-reduce", "ok"]["found"] and ("bandwidth", "ok") in found
    assert found["config", "ok"]["found"].endswith(": tp 1 x cp 1 x dp 2 x pp 1")
    assert "fits 2 ranks (those that the launcher started)" in found["config", "ok"]["found"]


@pytest.mark.mpi
def test_two_ranks_of_mpirun(tmp_path):
    done = mpirun(tmp_path, "doctor", "--json", PYTHONPATH=PATHS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = by_topic(json.loads(done.stdout)["findings"])
    assert found["launcher", "ok"]["found"].startswith("mpirun: 2 ranks on 1 host(s) met at ")
    assert "exact on 2 ranks" in found["all-reduce", "ok"]["found"]


@pytest.fixture
def hosts():
    try:
        hosts = Hosts()
    except NoRightsError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield hosts
    hosts.down()


APART = """
if [ "$NODE_RANK" = 1 ]; then
  export PYTHONPATH="$1:$PYTHONPATH"
  mount -t tmpfs none "$2" && ip link set dev cable mtu 1400
fi
shift 2 && exec "$@"
"""
"""The second host has another package, a folder of its own where the hosts should share one, and smaller packets."""


@pytest.mark.netns
def test_two_hosts_that_do_not_fit_each_other(hosts, tmp_path):
    shared, other = tmp_path / "run", tmp_path / "other"
    shared.mkdir()
    distribution(other, "numpy", "1.99.0")
    _, config, _ = runs.arguments(tmp_path)
    words = [str(ROOT / "launch" / "torchrun.sh"), "doctor", config, f"run.output_dir={shared}", "--json"]
    environment = ENVIRONMENT | {"NNODES": "2", "MASTER_ADDR": hosts.address(0), "PYTHON": warm.python()}
    environment["PYTHON_EXEC"] = environment["PYTHON"]  # the second host's path begins otherwise: that is the real one
    statuses, told = hosts.run(
        ["sh", "-c", APART, "sh", str(other), str(shared), *words], environment, tmp_path, TIMEOUT_S
    )
    assert statuses == [2, 2] and told.count('"findings"') == 1, told
    output = (tmp_path / f"{hosts.names[0]}.txt").read_text()
    answer, _ = json.JSONDecoder().raw_decode(output[output.index("{\n") :])
    found = by_topic(answer["findings"])
    first, last = answer["hosts"]
    assert answer["hosts"] == {first: [0], last: [1]} and first.endswith("a") and last.endswith("b")
    assert f"of {last} is not rank 0's" in found["shared folder", "problem"]["found"]
    assert found["output folder", "warning"]["where"] == last and "tmpfs" in found["output folder", "warning"]["found"]
    assert f"numpy is {found_numpy()}, but 1.99.0 on rank(s) 1 ({last})" == found["same on all", "problem"]["found"]
    assert "MTU is 1500, but 1400 on rank(s) 1" in found["same on all", "warning"]["found"]
    assert found["network", "ok"]["found"].startswith("cable (towards the other hosts)")
    assert found["clocks", "ok"]["found"].startswith("of 2 hosts agree")
    bandwidth = [each["found"] for each in answer["findings"] if each["topic"] == "bandwidth"]
    assert any(f"{first} and {last}" in each for each in bandwidth)
    assert list(shared.iterdir()) == []


def found_numpy():
    import numpy

    return numpy.__version__
