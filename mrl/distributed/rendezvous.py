"""Where the ranks meet before there is a process group, and by which interface they talk.

Owns the store of the ranks (torchrun's agents serve it, else rank 0) and the choice of this host's address and network
interface.
"""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

from mrl.distributed import mpi
from mrl.distributed.environment import Environment
from mrl.errors import UserError, first_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

ELSEWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737): asking for the route to it sends nothing and names the default interface."""


def meet(environment: Environment, timeout_s: float, *, served: bool = False) -> TCPStore:
    """Collective over the job: the store of all ranks, served by rank 0.

    Args:
        environment: Of any launcher.
        timeout_s: Wait for the others, s.
        served: The launcher serves it already, at the environment's address and port.

    Raises:
        UserError: Rank 0 has no address that other hosts could reach, or MPI is not usable.
        RuntimeError: The port is taken, or rank 0 cannot be reached.
    """
    address, port = environment.address, environment.port
    over_mpi = environment.launcher in ("mpirun", "mpi")
    if over_mpi and environment.rank > 0:
        address, port = mpi.tell(None, environment)
    elif over_mpi and not address:
        address = "127.0.0.1" if environment.num_nodes == 1 else own_address()
    store = _store(environment, address, port, timeout_s, serves=environment.rank == 0 and not served)
    if over_mpi and environment.rank == 0:
        mpi.tell((address, store.port), environment)
    return store


def _store(environment: Environment, address: str, port: int, timeout_s: float, *, serves: bool) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    try:
        return TCPStore(
            address,
            port,
            environment.world_size,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:  # torch's DistNetworkError and DistStoreError are RuntimeErrors
        what = (
            f"rank 0 cannot serve {address}:{port} on {socket.gethostname()}"
            if serves
            else f"rank {environment.rank} on {socket.gethostname()} cannot reach rank 0 at {address}:{port}"
        )
        raise RuntimeError(
            f"{what}: {first_line(error)}. Name a host and a free port of rank 0 that all hosts reach, by MASTER_ADDR "
            "and MASTER_PORT."
        ) from error


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
