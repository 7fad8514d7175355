"""A single gloo device for all process groups of a rank, instead of one per group.

A gloo device has a socket address and a thread that wakes up a hundred times a second. torch creates one per group and
Megatron about twenty groups per rank, so idle ranks would keep the host's cores busy.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

_THREADS_PER_DEVICE = 2
"""torch's default."""
_OPTIONS = {"timeout": "_timeout", "enable_reconfigure": "enable_reconfigure"}
"""Keyword with which torch creates a group -> attribute of the options; torch passes the second from 2.14."""
_original_init = dist.ProcessGroupGloo.__init__ if dist.is_gloo_available() else None


def share_device(interfaces: str) -> None:
    """Makes gloo groups created later share a device; does nothing if this torch lacks the options for it.

    Args:
        interfaces: Network interfaces, separated by commas, as in GLOO_SOCKET_IFNAME; "": the interface of the
            hostname.
    """
    if _original_init is None or not hasattr(getattr(dist.ProcessGroupGloo, "_Options", None), "_devices"):
        return

    @functools.wraps(_original_init)
    def make(self: Any, store: Any, rank: int, size: int, *given: Any, **named: Any) -> None:
        if given or not {"timeout"} <= set(named) <= set(_OPTIONS):  # called with options, which include the devices
            _original_init(self, store, rank, size, *given, **named)
            return
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = _devices(interfaces)
        options._threads = _THREADS_PER_DEVICE * len(options._devices)
        for name, value in named.items():
            setattr(options, _OPTIONS[name], value)
        _original_init(self, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = make  # type: ignore[method-assign]


@functools.cache
def _devices(interfaces: str) -> list[Any]:
    group = dist.ProcessGroupGloo
    names = [name for name in interfaces.split(",") if name]
    return [group.create_device(interface=name) for name in names] or [group.create_default_device()]
