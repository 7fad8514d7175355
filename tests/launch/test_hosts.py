"""launch/torchrun.sh on two hosts: addresses and interfaces are those of a network, names resolve nowhere."""

import os
import sys

import pytest

from tests import warm
from tests.e2e import runs
from tests.launch.conftest import SHORT
from tests.launch.hosts import Hosts, NoRightsError
from tests.source import ROOT

pytestmark = [pytest.mark.netns, pytest.mark.slow]
TIMEOUT_S = 240


@pytest.fixture
def train(tmp_path):
    """Starts a run on both hosts with more variables; its statuses, and what the hosts said."""
    try:
        hosts = Hosts()
    except NoRightsError as error:
        pytest.skip(f"no network namespaces here: {error}")

    def start(**variables):
        words = [str(ROOT / "launch" / "torchrun.sh"), *runs.arguments(tmp_path, SHORT)]
        environment = {
            **os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NNODES": "2",
            "MASTER_ADDR": hosts.address(0), **variables,
        }  # fmt: skip
        return hosts.run(words, environment, tmp_path, TIMEOUT_S)

    yield start
    hosts.down()


def test_two_hosts_train_to_the_same_numbers(train, expected, tmp_path):
    statuses, told = train(PYTHON_EXEC=warm.python())
    assert statuses == [0, 0], told
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == expected


def test_an_interface_that_leads_to_no_other_host_is_refused(train):
    statuses, told = train(GLOO_SOCKET_IFNAME="lo", PYTHON=warm.python(), PYTHON_EXEC=warm.python())
    assert statuses == [2, 2], told
    assert told.count("mrl: error: GLOO_SOCKET_IFNAME=lo is the loopback interface of ") == 2, told
    assert told.count("the interface that reaches the other hosts (cable)") == 2, told
