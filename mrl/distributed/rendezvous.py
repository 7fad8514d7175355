"""Where the ranks meet before there is a process group, and by which interface they talk.

Owns the store of the ranks (torchrun's agents serve it, else rank 0), who can reach its port, and the choice of this
host's address and network interface. A job on one host meets on the loopback interface, one on several hosts on the
interface that has the address of the first one.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

from mrl.distributed import mpi
from mrl.distributed.launcher_env import Environment
from mrl.errors import ClusterError, UserError, first_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"

BACKLOG = 4096
"""Ranks that knock at the store at once; the kernel's own limit (net.core.somaxconn) holds too."""

ELSEWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737): asking for the route to it sends nothing and names the default interface."""


def meet(environment: Environment, timeout_s: float, *, served: bool = False, token: str = "") -> tuple[TCPStore, str]:
    """Collective over the job: the store of all ranks, served by rank 0, and the job's token.

    Args:
        environment: Of any launcher.
        timeout_s: Wait for the others, s.
        served: The launcher serves it already, at the environment's address and port.
        token: Of this rank; over MPI that of rank 0 counts.

    Raises:
        UserError: Rank 0 has no address that other hosts could reach, its port is taken, or MPI is not usable.
        ClusterError: Rank 0 cannot be reached.
    """
    address, port = environment.address, environment.port
    over_mpi = environment.launcher in ("mpirun", "mpi")
    one_host = environment.local_world_size == environment.world_size
    serves = environment.rank == 0 and not served
    if over_mpi and environment.rank > 0:
        address, port, token = mpi.tell(None, environment)
    elif one_host and not served:
        address = LOOPBACK
    elif over_mpi and not address:
        address = own_address()
    try:
        store = open_store(address, port, serves=serves, one_host=one_host, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:  # torch's DistNetworkError and DistStoreError are RuntimeErrors
        raise ClusterError(
            f"rank {environment.rank} on {socket.gethostname()} cannot reach rank 0 at {address}:{port}: "
            f"{first_line(error).rstrip('.')}. Name a host and a free port of rank 0 that all hosts reach, by "
            "MASTER_ADDR and MASTER_PORT."
        ) from error
    if over_mpi and environment.rank == 0:
        mpi.tell((address, store.port, token), environment)
    return store, token


def open_store(address: str, port: int, *, serves: bool, one_host: bool, timeout: timedelta) -> TCPStore:
    """A store at an address; where this process serves it, it listens on that address alone.

    Args:
        address: Name or address of the host that serves.
        port: On that host; 0: any free one.
        serves: Whether that is this process.
        one_host: The job has no other host.
        timeout: Wait for the server, and for keys.

    Raises:
        UserError: The port is taken, or not allowed.
        RuntimeError: Nobody answers.
    """
    from torch._C._distributed_c10d import TCPStore

    if not serves:
        return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    listener = _listen(address, port, one_host=one_host)
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _listen(address: str, port: int, *, one_host: bool) -> socket.socket:
    """A socket that listens where the job's hosts knock, and nowhere else if that can be told."""
    family, where = socket.AF_INET, LOOPBACK
    if not one_host:
        found = _address_of(address)
        if found is None or found[1].is_loopback:  # Debian: 127.0.1.1 is the host's own name
            where = ""
        else:
            family, where = found[0], str(found[1])
    try:
        return _listener(family, where, port)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise UserError(
                f"{socket.gethostname()} cannot serve port {port}, where the ranks are to meet: "
                f"{os.strerror(error.errno or 0)}. Another job may have it: set MASTER_PORT to a free port, the "
                "same on each host."
            ) from error
    return _listener(socket.AF_INET, "", port)  # an address that a router hands on to this host


def _listener(family: socket.AddressFamily, where: str, port: int) -> socket.socket:
    return socket.create_server((where, port), family=family, backlog=BACKLOG)


def _address_of(
    name: str,
) -> tuple[socket.AddressFamily, ipaddress.IPv4Address | ipaddress.IPv6Address] | None:
    try:
        family, _, _, _, where = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0]
    except OSError:
        return None
    return family, ipaddress.ip_address(where[0])


def own_address(towards: str = ELSEWHERE) -> str:
    """This host's address as another host sees it.

    Args:
        towards: Name or address of the other one; default: anyone outside.

    Raises:
        UserError: There is no way to it, or only the loopback interface.
    """
    found = _source(towards)
    if not found or ipaddress.ip_address(found).is_loopback:  # Debian: 127.0.1.1 is the host's own name
        found = _source(ELSEWHERE)
    if not found:
        raise UserError(
            f"this host ({socket.gethostname()}) has no address for other hosts: set MASTER_ADDR to the name or "
            "address of the first host, and MASTER_PORT to a free port there."
        )
    return found


def choose_interface(environment: Environment, chosen: str) -> str:
    """The network interface of this rank's groups of gloo; "" where it cannot be told.

    Args:
        environment: Of this rank.
        chosen: What GLOO_SOCKET_IFNAME says, "" where it is not set.

    Raises:
        UserError: By `chosen` no rank would reach one of another host: gloo would wait for them in silence.
    """
    found = interface(environment)
    if chosen == _loopback() and found not in ("", chosen):
        raise UserError(
            f"GLOO_SOCKET_IFNAME={chosen}, which leads to this host alone, but only {environment.local_world_size} of "
            f"the job's {environment.world_size} ranks are on it ({socket.gethostname()}); its way to the others is "
            f"{found}. Unset GLOO_SOCKET_IFNAME, or name the interface of the cluster."
        )
    return chosen or found


def interface(environment: Environment) -> str:
    """The network interface by which gloo's ranks talk: loopback on one host; "" where it cannot be told."""
    loopback = _loopback()
    if environment.local_world_size == environment.world_size:
        return loopback  # a laptop's hostname often does not resolve
    try:
        address = own_address(environment.address or ELSEWHERE)
    except UserError:
        return loopback  # several "hosts" on a machine without a network
    return next(
        (name for name, own in psutil.net_if_addrs().items() if any(item.address == address for item in own)), ""
    )


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])


def _source(towards: str) -> str:
    """The address that a packet to `towards` would leave from; "" where there is no route or no such name."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
