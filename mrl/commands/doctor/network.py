"""Checks of a host's network interface, its name, and its ports, without other hosts; `collectives.py` has the rest."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from mrl.commands.doctor.finding import Finding, ok, problem, warning
from mrl.distributed.launcher_env import LauncherEnv
from mrl.distributed.rendezvous import interface

DEFAULT_PORT = 29500
"""Default MASTER_PORT of launch/torchrun.sh."""
SLOW_NAME_S = 1.0
"""Slowest normal look-up of a name, s; a look-up that waits for a dead name server takes seconds."""
SOCKETS_OF_A_PAIR = 16
"""Process groups that two ranks of a run may share; gloo opens a socket for each."""
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Interface:
    """Network interface.

    Attributes:
        name: Name such as "eth0"; "": unknown.
        up: True if it is up.
        mtu: MTU, bytes.
        mbit_s: Speed from the driver, Mbit/s; 0: unknown.
    """

    name: str
    up: bool = False
    mtu: int = 0
    mbit_s: int = 0


def read_interfaces() -> dict[str, Interface]:
    """Returns the network interfaces of this host by name."""
    return {name: Interface(name, each.isup, each.mtu, each.speed) for name, each in psutil.net_if_stats().items()}


def check_interface(
    environment: LauncherEnv, interfaces: Mapping[str, Interface], chosen: Mapping[str, str]
) -> Iterator[Finding]:
    """Checks the interface that the ranks use.

    Args:
        environment: Environment of a rank on this host.
        interfaces: Interfaces of this host by name.
        chosen: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if set.
    """
    for variable, value in chosen.items():
        if not any(_names(variable, value, name) for name in interfaces):
            yield problem(
                "network",
                f"{variable}={value}, but this host has {', '.join(interfaces)}",
                f"unset {variable}, or name an interface that every host has",
            )
            return
    name = chosen.get("GLOO_SOCKET_IFNAME") or interface(environment)
    found = interfaces.get(name.split(",")[0])
    if found is None:
        yield warning(
            "network",
            "the route to the other hosts uses no interface with a known address",
            "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the cluster's interface",
        )
    elif not found.up:
        yield problem("network", f"interface {name} is down", "bring it up, or choose another: GLOO_SOCKET_IFNAME")
    elif environment.num_nodes > 1 and name.startswith("lo"):
        yield problem(
            "network",
            f"{environment.num_nodes} hosts, but this one has only the loopback interface",
            "give the container the host's network (--network=host), or set GLOO_SOCKET_IFNAME",
        )
    else:
        speed = f", {found.mbit_s / 1000:g} Gbit/s" if found.mbit_s else ""
        why = "ranks of one host" if name.startswith("lo") else "towards the other hosts"
        yield ok("network", f"{name} ({why}), MTU {found.mtu}{speed}")


def _names(variable: str, value: str, name: str) -> bool:
    """Returns whether a variable's value selects an interface.

    Gloo expects names, NCCL prefixes; for NCCL "=" requires an exact match and "^" excludes.
    """
    if variable.startswith("GLOO"):
        return name in value.split(",")
    exact, without = value.lstrip("^").startswith("="), value.startswith("^")
    words = value.lstrip("^").lstrip("=").split(",")
    return any(name == word if exact else name.startswith(word) for word in words) != without


def interface_facts(environment: LauncherEnv) -> dict[str, str]:
    """Returns the MTU, which must agree on all hosts: packets larger than another host's MTU are lost."""
    found = read_interfaces().get(interface(environment))
    return {} if found is None or environment.num_nodes == 1 else {"MTU": str(found.mtu)}


def check_name(name: str, seconds: float, addresses: Sequence[str]) -> Iterator[Finding]:
    """Checks the resolution of this host's name.

    Args:
        name: Host name.
        seconds: Time of the look-up, s.
        addresses: Addresses of the name; empty: it does not resolve.
    """
    if seconds > SLOW_NAME_S:
        yield warning(
            "host name",
            f"looking up '{name}' takes {seconds:.1f} s, which may delay every connection",
            "fix /etc/resolv.conf, or add the hosts to /etc/hosts",
        )
    elif not addresses:
        yield ok("host name", f"'{name}' does not resolve; mrl uses addresses (so must MASTER_ADDR)")
    else:
        yield ok("host name", f"'{name}' is {addresses[0]}, looked up in {1000 * seconds:.0f} ms")


def resolve_name(name: str) -> tuple[float, list[str]]:
    """Returns (seconds, addresses) of the look-up of a name."""
    start = time.monotonic()
    try:
        found = sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        found = []
    return time.monotonic() - start, found


def check_port(port: int, outgoing: tuple[int, int]) -> Iterator[Finding]:
    """Checks that the rendezvous port is free on this host.

    Args:
        port: MASTER_PORT.
        outgoing: First and last port of outgoing connections.
    """
    advice = "set MASTER_PORT to a free port, below " + str(outgoing[0])
    try:
        with socket.socket() as probe:
            probe.bind(("", port))
    except OSError as error:
        what = "taken" if error.errno == errno.EADDRINUSE else f"not available ({error.strerror})"
        yield problem("port", f"{port} (MASTER_PORT) is {what}", advice)
        return
    if outgoing[0] <= port <= outgoing[1]:
        yield warning("port", f"{port} (MASTER_PORT) is free now, but outgoing connections may take it", advice)
    else:
        yield ok(
            "port", f"{port} (MASTER_PORT) is free, and outside the range of outgoing ports {outgoing[0]}-{outgoing[1]}"
        )


def check_outgoing(outgoing: tuple[int, int], world_size: int, local_world_size: int) -> Iterator[Finding]:
    """Checks that there are enough outgoing ports for gloo's connections between the ranks."""
    available, wanted = outgoing[1] - outgoing[0] + 1, SOCKETS_OF_A_PAIR * world_size * local_world_size
    if available < wanted:
        yield warning(
            "ports",
            f"{available} outgoing ports for {local_world_size} x {world_size} pairs of ranks",
            "widen net.ipv4.ip_local_port_range (sysctl)",
        )
    else:
        yield ok("ports", f"{available} for outgoing connections, at most {wanted} needed")


def outgoing_ports(file: Path = PORT_RANGE) -> tuple[int, int]:
    """Returns the first and last port of Linux's range for outgoing connections."""
    first, last = file.read_text().split()
    return int(first), int(last)
