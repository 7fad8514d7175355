"""Restricted unpickler for torch.distributed's object collectives: it builds data and runs no code.

It serves `all_gather_object`, `broadcast_object_list` and the like, in mrl's own calls and in those of Megatron's and
torch's checkpoints. torch's own unpickler runs whatever a pickle names, and the connections between ranks are not
authenticated. Allowed are plain values of Python and torch, and the records (dataclasses, named tuples, enumerations)
and exceptions of PACKAGES. An exception of another package is replaced by one with its name and message.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import io
import pickle
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from mrl.distributed.unpickling import member_getter, public_module

PACKAGES = ("mrl.", "torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
"""Packages whose records and exceptions a rank may send."""

_PLAIN = frozenset(
    {
        *(
            ("builtins", name)
            for name in ("set", "frozenset", "slice", "complex", "bytearray", "range", "list", "dict")
        ),
        *(("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")),
        ("decimal", "Decimal"),
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.serialization", "_get_layout"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("traceback", "StackSummary"),
        ("traceback", "FrameSummary"),
    }
)


class UnsafePickleError(RuntimeError):
    """Error for a pickle that names something other than data."""


def install() -> None:
    """Makes this process's object collectives use `SafeUnpickler`."""
    if "_unpickler" not in vars(c10d):
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.distributed.distributed_c10d._unpickler, which mrl replaces by a "
            "restricted one. Use a supported version of torch."
        )
    vars(c10d)["_unpickler"] = SafeUnpickler


class RemoteError(RuntimeError):
    """Placeholder for another rank's exception whose class is not in an allowed package."""


class SafeUnpickler(pickle.Unpickler):
    """Unpickler of messages from other ranks."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns the class of that name.

        Raises:
            UnsafePickleError: The class is not in the allowed list.
        """
        module = public_module(module)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        if (module, name) == ("builtins", "getattr"):
            return member_getter(_refusal("builtins.getattr"))
        found = getattr(sys.modules.get(module), name, None)  # a pickle must not trigger an import
        if (module, name) in _PLAIN or (module == "torch" and isinstance(found, torch.dtype)):
            return super().find_class(module, name)
        if isinstance(found, type) and issubclass(found, BaseException):
            own = f"{module}.".startswith(PACKAGES) or found.__module__ == builtins.__name__
            return found if own else partial(_foreign_exception, name)
        if isinstance(found, type) and f"{module}.".startswith(PACKAGES) and _is_record(found):
            return found
        raise _refusal(f"{module}.{name}")


def _refusal(name: str) -> UnsafePickleError:
    return UnsafePickleError(
        f"a message from another rank contains '{name}', which is not data. It was rejected: a process outside this "
        "job may have sent it."
    )


def _is_record(found: type) -> bool:
    is_named_tuple = issubclass(found, tuple) and hasattr(found, "_fields")
    return dataclasses.is_dataclass(found) or issubclass(found, enum.Enum) or is_named_tuple


def _foreign_exception(name: str, *args: object) -> RemoteError:
    return RemoteError(f"{name}: {', '.join(map(str, args))}")


def _load_storage(data: bytes) -> Any:
    """Replaces torch's own function, which would unpickle without restrictions."""
    return torch.load(io.BytesIO(data), weights_only=True)
