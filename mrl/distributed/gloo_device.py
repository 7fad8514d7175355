"""One gloo device for all process groups of a rank, in place of one for each.

A gloo device is a socket address and a thread that wakes up a hundred times a second. torch makes a new one for each
group; Megatron makes some twenty groups in each rank, so that idle ranks of one host would keep its cores busy.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

_THREADS_PER_DEVICE = 2
"""As in torch."""
_make = dist.ProcessGroupGloo.__init__ if dist.is_gloo_available() else None


def share_device(interfaces: str) -> None:
    """Groups of gloo that are made from here on share a device; a torch without such options makes them as it does.

    Args:
        interfaces: Network interfaces, separated by commas, as in GLOO_SOCKET_IFNAME; "": that of the host's name.
    """
    if _make is None or not hasattr(getattr(dist.ProcessGroupGloo, "_Options", None), "_devices"):
        return

    @functools.wraps(_make)
    def make(self: Any, store: Any, rank: int, size: int, *given: Any, **named: Any) -> None:
        if given or set(named) != {"timeout"}:  # by options: its devices were chosen
            _make(self, store, rank, size, *given, **named)
            return
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = _devices(interfaces)
        options._threads = _THREADS_PER_DEVICE * len(options._devices)
        options._timeout = named["timeout"]
        _make(self, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = make  # type: ignore[method-assign]


@functools.cache
def _devices(interfaces: str) -> list[Any]:
    group = dist.ProcessGroupGloo
    names = [name for name in interfaces.split(",") if name]
    return [group.create_device(interface=name) for name in names] or [group.create_default_device()]
