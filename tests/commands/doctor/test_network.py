import socket

import pytest

from mrl.commands.doctor.network import (
    Interface,
    check_interface,
    check_name,
    check_outgoing,
    check_port,
    interface_facts,
    outgoing_ports,
    read_interfaces,
    resolve_name,
)
from mrl.distributed.launcher_env import LauncherEnv

TWO_HOSTS = LauncherEnv(world_size=2, num_nodes=2, address="127.0.0.1")


def told(findings):
    ((level, found),) = [(each.level, each.found) for each in findings]
    return level, found


def test_ranks_of_one_host_talk_over_loopback():
    level, found = told(check_interface(LauncherEnv(), read_interfaces(), {}))
    assert level == "ok" and "ranks of one host" in found


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [
        ("GLOO_SOCKET_IFNAME", "nosuch0", "problem"),
        ("GLOO_SOCKET_IFNAME", "ib0", "ok"),
        ("NCCL_SOCKET_IFNAME", "eth", "problem"),
        ("NCCL_SOCKET_IFNAME", "=ib", "problem"),
        ("NCCL_SOCKET_IFNAME", "ib", "ok"),
        ("NCCL_SOCKET_IFNAME", "=ib0", "ok"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "ok"),
    ],
)
def test_an_interface_that_somebody_chose_must_exist(variable, value, level):
    interfaces = {"lo": Interface("lo", True), "ib0": Interface("ib0", True, 2044, 200000)}
    assert told(check_interface(LauncherEnv(), interfaces, {variable: value}))[0] == level


def test_loopback_between_hosts_and_an_interface_that_is_down_are_problems():
    level, found = told(check_interface(TWO_HOSTS, {"lo": Interface("lo", True)}, {"GLOO_SOCKET_IFNAME": "lo"}))
    assert level == "problem" and "2 hosts, but this one has only the loopback interface" in found
    level, found = told(check_interface(TWO_HOSTS, {"ib0": Interface("ib0")}, {"GLOO_SOCKET_IFNAME": "ib0"}))
    assert (level, found) == ("problem", "interface ib0 is down")
    assert told(check_interface(TWO_HOSTS, {}, {}))[0] == "warning"


def test_the_mtu_matters_between_hosts():
    assert interface_facts(LauncherEnv()) == {}


def test_a_slow_name_server_is_told():
    assert told(check_name("node1", 10.2, ["10.0.0.1"]))[0] == "warning"
    assert told(check_name("node1", 0.01, []))[0] == "ok"
    seconds, addresses = resolve_name("localhost")
    assert "127.0.0.1" in addresses and seconds < 5
    assert resolve_name("no-such-host.invalid")[1] == []


def test_a_port_that_is_taken_or_may_be():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        level, found = told(check_port(taken.getsockname()[1], (32768, 60999)))
    assert level == "problem" and found.endswith("(MASTER_PORT) is taken")
    with socket.socket() as probe:
        probe.bind(("", 0))
        free = probe.getsockname()[1]
    assert told(check_port(free, (free - 1, free + 1)))[0] == "warning"
    assert told(check_port(free, (1, 2)))[0] == "ok"


def test_ports_for_all_pairs():
    first, last = outgoing_ports()
    assert 0 < first < last < 65536
    assert told(check_outgoing((32768, 60999), 8, 8))[0] == "ok"
    assert told(check_outgoing((32768, 60999), 1024, 8))[0] == "warning"
