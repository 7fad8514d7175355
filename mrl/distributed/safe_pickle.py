"""What torch.distributed's object collectives may build of what they receive: data, and nothing that runs.

Owns the unpickler of `all_gather_object`, `broadcast_object_list` and their kin, in mrl's own calls and in those of
Megatron's and torch's checkpoints. torch's own would run whatever a pickle asks for, and a pickle comes over a
connection that asks nobody for a name. Built are Python's and torch's plain values, and the records (dataclasses, named
tuples, enumerations) and exceptions of this job's own packages; of another package's exception come its name and words.
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

from mrl.distributed.pickled_enums import member_getter

PACKAGES = ("mrl.", "torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
"""Their records may come from another rank."""

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


class NotDataError(RuntimeError):
    """A pickle asks for something that is no data."""


def install() -> None:
    """From here on this process's object collectives build data only."""
    if "_unpickler" not in vars(c10d):
        raise RuntimeError(f"torch {torch.__version__} unpickles what ranks send in a way that mrl does not know.")
    vars(c10d)["_unpickler"] = DataOnly


class OtherError(RuntimeError):
    """An exception of another rank, of a package that is not this job's."""


class DataOnly(pickle.Unpickler):
    """Builds what a rank may send to another one."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name.

        Raises:
            NotDataError: It is none that stands for data.
        """
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        if (module, name) == ("builtins", "getattr"):
            return member_getter(_refusal("builtins.getattr"))
        found = getattr(sys.modules.get(module), name, None)  # nothing is imported because a pickle says so
        if (module, name) in _PLAIN or (module == "torch" and isinstance(found, torch.dtype)):
            return super().find_class(module, name)
        if isinstance(found, type) and issubclass(found, BaseException):
            own = f"{module}.".startswith(PACKAGES) or found.__module__ == builtins.__name__
            return found if own else partial(_other, name)
        if isinstance(found, type) and f"{module}.".startswith(PACKAGES) and _is_record(found):
            return found
        raise _refusal(f"{module}.{name}")


def _refusal(asked: str) -> NotDataError:
    return NotDataError(
        f"a rank sent what asks for '{asked}', which is not data. It was not read: a process that is none of the job's "
        "may have sent it."
    )


def _is_record(found: type) -> bool:
    is_named_tuple = issubclass(found, tuple) and hasattr(found, "_fields")
    return dataclasses.is_dataclass(found) or issubclass(found, enum.Enum) or is_named_tuple


def _other(name: str, *args: object) -> OtherError:
    return OtherError(f"{name}: {', '.join(map(str, args))}")


def _load_storage(data: bytes) -> Any:
    """In the place of torch's, which would unpickle without a question."""
    return torch.load(io.BytesIO(data), weights_only=True)
