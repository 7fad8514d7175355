"""TCPStore of the ranks, from which the process group is created, and the choice of this host's address and interface.

torchrun's agent serves the store, otherwise rank 0. The server listens only where the job's hosts need to reach it: on
the loopback interface for a job on one host, otherwise on the interface with the first host's address.
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
from mrl.distributed.launcher_env import LauncherEnv
from mrl.errors import ClusterError, UserError, first_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"

BACKLOG = 4096
"""Pending connections to the store; the kernel caps it at net.core.somaxconn."""

UNUSED_ADDRESS = "192.0.2.1"
"""Address reserved for documentation (RFC 5737). Looking up its route sends nothing and gives the default interface."""


def connect_store(
    environment: LauncherEnv, timeout_s: float, *, served: bool = False, token: str = ""
) -> tuple[TCPStore, str]:
    """Collective over all ranks: connects to the store, which rank 0 serves unless the launcher does.

    Args:
        environment: Launcher's environment of this rank.
        timeout_s: Longest wait for the store and for its keys, s.
        served: The launcher already serves the store at the environment's address and port.
        token: This rank's job token; with MPI only rank 0's is used.

    Returns:
        (store, job token).

    Raises:
        UserError: Rank 0 has no address that other hosts could reach, its port is taken, or MPI is not usable.
        ClusterError: Rank 0 cannot be reached.
    """
    address, port = environment.address, environment.port
    over_mpi = environment.launcher in ("mpirun", "mpi")
    one_host = environment.local_world_size == environment.world_size
    serves = environment.rank == 0 and not served
    if over_mpi and environment.rank > 0:
        address, port, token = mpi.broadcast(None, environment)
    elif one_host and not served:
        address = LOOPBACK
    elif over_mpi and not address:
        address = own_address()
    try:
        store = open_store(address, port, serves=serves, one_host=one_host, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:  # torch's DistNetworkError and DistStoreError are RuntimeErrors
        raise ClusterError(
            f"rank {environment.rank} on {socket.gethostname()} cannot reach rank 0 at {address}:{port}: "
            f"{first_line(error).rstrip('.')}. Set MASTER_ADDR and MASTER_PORT to an address and a free port of rank "
            "0's host that all hosts can reach."
        ) from error
    if over_mpi and environment.rank == 0:
        mpi.broadcast((address, store.port, token), environment)
    return store, token


def open_store(address: str, port: int, *, serves: bool, one_host: bool, timeout: timedelta) -> TCPStore:
    """Returns a TCPStore client, and with `serves` its server too, which listens on `address` only.

    Args:
        address: Name or address of the serving host.
        port: Port on that host; 0: any free one.
        serves: This process is the server.
        one_host: All ranks are on this host.
        timeout: Longest wait for the server and for keys.

    Raises:
        UserError: The port is taken or not permitted.
        RuntimeError: The server does not answer.
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
    """Returns a listening socket, bound to the narrowest address that the job's hosts can reach."""
    family, bound_to = socket.AF_INET, LOOPBACK
    if not one_host:
        found = _resolve(address)
        if found is None or found[1].is_loopback:  # Debian maps the host's own name to 127.0.1.1
            bound_to = ""
        else:
            family, bound_to = found[0], str(found[1])
    try:
        return socket.create_server((bound_to, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise UserError(
                f"{socket.gethostname()} cannot listen on port {port} for the other ranks: "
                f"{os.strerror(error.errno or 0)}. Another job may use it: set MASTER_PORT to a free port, the "
                "same on each host."
            ) from error
    # the address is not this host's own: a router forwards it
    return socket.create_server(("", port), family=socket.AF_INET, backlog=BACKLOG)


def _resolve(name: str) -> tuple[socket.AddressFamily, ipaddress.IPv4Address | ipaddress.IPv6Address] | None:
    try:
        family, _, _, _, address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0]
    except OSError:
        return None
    return family, ipaddress.ip_address(address[0])


def own_address(towards: str = UNUSED_ADDRESS) -> str:
    """Returns this host's address as another host sees it.

    Args:
        towards: Name or address of the other host; default: any outside host.

    Raises:
        UserError: There is no route, or only over the loopback interface.
    """
    found = _source_address(towards)
    if not found or ipaddress.ip_address(found).is_loopback:  # Debian maps the host's own name to 127.0.1.1
        found = _source_address(UNUSED_ADDRESS)
    if not found:
        raise UserError(
            f"this host ({socket.gethostname()}) has no address that other hosts could reach. Set MASTER_ADDR to the "
            "name or address of the first host, and MASTER_PORT to a free port there."
        )
    return found


def choose_interface(environment: LauncherEnv, chosen: str) -> str:
    """Returns the network interface for this rank's gloo groups; "" if unknown.

    Args:
        environment: Launcher's environment of this rank.
        chosen: Value of GLOO_SOCKET_IFNAME; "" if it is not set.

    Raises:
        UserError: `chosen` is the loopback interface and there are ranks on other hosts: gloo would wait silently.
    """
    found = interface(environment)
    if chosen == _loopback() and found not in ("", chosen):
        raise UserError(
            f"GLOO_SOCKET_IFNAME={chosen} is the loopback interface of {socket.gethostname()}, but only "
            f"{environment.local_world_size} of the job's {environment.world_size} ranks are on this host. Unset "
            f"GLOO_SOCKET_IFNAME, or set it to the interface that reaches the other hosts ({found})."
        )
    return chosen or found


def interface(environment: LauncherEnv) -> str:
    """Returns the network interface for gloo: loopback for a job on one host; "" if unknown."""
    loopback = _loopback()
    if environment.local_world_size == environment.world_size:
        return loopback  # independent of whether the hostname resolves
    try:
        address = own_address(environment.address or UNUSED_ADDRESS)
    except UserError:
        return loopback  # several "hosts" on a machine without a network
    return next(
        (name for name, own in psutil.net_if_addrs().items() if any(item.address == address for item in own)), ""
    )


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])


def _source_address(towards: str) -> str:
    """Returns the source address of packets to `towards`; "" if there is no route or no such name."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
