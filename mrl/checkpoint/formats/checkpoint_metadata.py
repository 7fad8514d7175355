"""Reading of a distributed checkpoint's `.metadata` without executing code.

The file is a pickle. Its unpickler accepts the classes of metadata only, so that a checkpoint from elsewhere cannot run
code. `checkpoint/formats/torch_dist.py` and `megatron/checkpoint.py` interpret the metadata.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from mrl.distributed.unpickling import member_getter, public_module
from mrl.errors import UserError, first_line

METADATA = ".metadata"
"""Name of the file."""
COMMON_STATE = "common_state/shard_0_1"
"""Entry in which megatron-core 0.19 stores what older versions store in `common.pt`."""

_CLASSES = frozenset(
    {
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        # a rank's cached plan of its writes
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        ("torch.distributed.checkpoint.planner", "SavePlan"),
        ("torch.distributed.checkpoint.planner", "WriteItem"),
        ("torch.distributed.checkpoint.planner", "WriteItemType"),
        ("torch.distributed.checkpoint.planner", "TensorWriteData"),
        ("torch.distributed.checkpoint.planner", "BytesIOWriteData"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "Path"),
    }
)
_DTYPES = frozenset({"float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"})


def read_metadata(file: Path) -> dcp.Metadata:
    """Reads a metadata pickle with an unpickler that builds metadata classes only.

    Raises:
        UserError: The file is missing or unreadable, or refers to another class or function.
    """
    if not file.is_file():
        raise UserError(f"'{file.parent}' is not a Megatron checkpoint: it has no {file.name}.")
    try:
        metadata = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
    except UserError:
        raise
    except Exception as error:  # a broken pickle raises anything
        raise UserError(f"'{file}' cannot be read: {type(error).__name__}: {error}.") from error
    if not isinstance(metadata, dcp.Metadata):
        raise UserError(f"'{file}' contains a {type(metadata).__name__}, not the metadata of a distributed checkpoint.")
    return metadata


def read_common_state(folder: Path) -> Any:
    """Returns the values besides tensors of a checkpoint by megatron-core 0.19, read without executing code.

    Args:
        folder: Checkpoint folder without `common.pt`.

    Raises:
        UserError: The folder has no such values, or they contain more than plain data and tensors.
    """
    for index, place in read_metadata(folder / METADATA).storage_data.items():
        if index.fqn == COMMON_STATE:
            with (folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                data = file.read(place.length)
            try:
                return torch.load(io.BytesIO(data), weights_only=True)[0]
            except Exception as error:  # a broken pickle raises anything
                raise UserError(
                    f"'{folder}': its common state cannot be read as data: {type(error).__name__}: "
                    f"{first_line(error)}. It was not written by mrl or Megatron, and is not loaded."
                ) from error
    raise UserError(f"'{folder}' is not a complete Megatron checkpoint: it has neither common.pt nor a common state.")


class _MegatronMetadata(dcp.Metadata):
    """Placeholder for megatron-core 0.15's subclass of torch's metadata class."""


class _MegatronPlan:
    """Placeholder for megatron-core 0.15's cached plan of a rank."""


_PLACEHOLDERS = {"MCoreMetadata": _MegatronMetadata, "MCoreSavePlan": _MegatronPlan}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = public_module(module)
        if (module, name) in _CLASSES or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        if module == "megatron.core.dist_checkpointing.strategies.torch" and name in _PLACEHOLDERS:
            return _PLACEHOLDERS[name]
        refusal = UserError(
            f"the checkpoint's metadata refers to '{module}.{name}', which is not data. It was not written by mrl or "
            "Megatron, and is not loaded."
        )
        if (module, name) == ("builtins", "getattr"):
            return member_getter(refusal)
        raise refusal
