"""Network of a host: the interface of its ranks, its name, and the port where a job meets.

Owns what can be seen without another host; what passes between ranks is `collectives.py`'s.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from mrl.commands.doctor.finding import Finding, ok, problem, warning
from mrl.distributed.launcher_env import Environment
from mrl.distributed.rendezvous import interface

DEFAULT_PORT = 29500
"""Of launch/torchrun.sh."""
SLOW_NAME_S = 1.0
"""A look-up in a file or a near name server takes milliseconds; one that waits for a silent server takes seconds."""
SOCKETS_OF_A_PAIR = 16
"""Process groups in which two ranks of a run may meet; gloo opens a socket for each."""
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: Such as "eth0"; "": it could not be told.
        up: Whether it is.
        mtu: Largest packet, bytes.
        mbit_s: Speed as the driver tells it; 0: it does not.
    """

    name: str
    up: bool = False
    mtu: int = 0
    mbit_s: int = 0


def read_interfaces() -> dict[str, Interface]:
    """All of this host."""
    return {name: Interface(name, each.isup, each.mtu, each.speed) for name, each in psutil.net_if_stats().items()}


def check_interface(
    environment: Environment, interfaces: Mapping[str, Interface], chosen: Mapping[str, str]
) -> Iterator[Finding]:
    """By which interface the ranks talk.

    Args:
        environment: Of a rank of this host.
        interfaces: Of this host.
        chosen: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME where somebody has set them.
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
            "this host's way to the others is by no interface with a known address",
            "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the cluster's interface",
        )
    elif not found.up:
        yield problem("network", f"interface {name} is down", "bring it up, or choose another: GLOO_SOCKET_IFNAME")
    elif environment.num_nodes > 1 and name.startswith("lo"):
        yield problem(
            "network",
            f"{environment.num_nodes} hosts, and this one has only loopback",
            "is the container's network the host's (--network=host)? Else set GLOO_SOCKET_IFNAME",
        )
    else:
        speed = f", {found.mbit_s / 1000:g} Gbit/s" if found.mbit_s else ""
        why = "ranks of one host" if name.startswith("lo") else "towards the other hosts"
        yield ok("network", f"{name} ({why}), MTU {found.mtu}{speed}")


def _names(variable: str, value: str, name: str) -> bool:
    """Whether a variable's value means an interface: gloo wants names, NCCL prefixes, "=" exact ones, "^" others."""
    if variable.startswith("GLOO"):
        return name in value.split(",")
    exact, without = value.lstrip("^").startswith("="), value.startswith("^")
    words = value.lstrip("^").lstrip("=").split(",")
    return any(name == word if exact else name.startswith(word) for word in words) != without


def interface_facts(environment: Environment) -> dict[str, str]:
    """What has to be equal on all hosts: packets that fit one host's network and not another's are lost."""
    found = read_interfaces().get(interface(environment))
    return {} if found is None or environment.num_nodes == 1 else {"MTU": str(found.mtu)}


def check_name(name: str, seconds: float, addresses: Sequence[str]) -> Iterator[Finding]:
    """This host's name.

    Args:
        name: The name.
        seconds: That its look-up took.
        addresses: What it stands for; none: nobody knows it.
    """
    if seconds > SLOW_NAME_S:
        yield warning(
            "host name",
            f"looking up '{name}' takes {seconds:.1f} s, and every connection may",
            "mend /etc/resolv.conf, or put the hosts into /etc/hosts",
        )
    elif not addresses:
        yield ok("host name", f"'{name}' resolves nowhere; mrl uses addresses (MASTER_ADDR must resolve, or be one)")
    else:
        yield ok("host name", f"'{name}' is {addresses[0]}, looked up in {1000 * seconds:.0f} ms")


def look_up(name: str) -> tuple[float, list[str]]:
    """(seconds, addresses) of a name."""
    start = time.monotonic()
    try:
        found = sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        found = []
    return time.monotonic() - start, found


def check_port(port: int, outgoing: tuple[int, int]) -> Iterator[Finding]:
    """The port where a job would meet, on this host.

    Args:
        port: MASTER_PORT.
        outgoing: First and last port of outgoing connections.
    """
    advice = "set MASTER_PORT to a free port, below " + str(outgoing[0])
    try:
        with socket.socket() as probe:
            probe.bind(("", port))
    except OSError as error:
        what = "taken" if error.errno == errno.EADDRINUSE else f"not to be had ({error.strerror})"
        yield problem("port", f"{port} (MASTER_PORT) is {what}", advice)
        return
    if outgoing[0] <= port <= outgoing[1]:
        yield warning("port", f"{port} (MASTER_PORT) is free now, but outgoing connections may take it", advice)
    else:
        yield ok(
            "port", f"{port} (MASTER_PORT) is free, and none of the outgoing connections' {outgoing[0]}-{outgoing[1]}"
        )


def check_outgoing(outgoing: tuple[int, int], world_size: int, local_world_size: int) -> Iterator[Finding]:
    """Whether there are ports enough for gloo's connections of the ranks of a host."""
    there, wanted = outgoing[1] - outgoing[0] + 1, SOCKETS_OF_A_PAIR * world_size * local_world_size
    if there < wanted:
        yield warning(
            "ports",
            f"{there} ports of outgoing connections for {local_world_size} x {world_size} pairs of ranks",
            "widen net.ipv4.ip_local_port_range (sysctl)",
        )
    else:
        yield ok("ports", f"{there} for outgoing connections, at most {wanted} wanted")


def outgoing_ports(file: Path = PORT_RANGE) -> tuple[int, int]:
    """First and last port that Linux takes outgoing connections from."""
    first, last = file.read_text().split()
    return int(first), int(last)
