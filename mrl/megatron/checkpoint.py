"""The actor in a folder: model and optimizer through megatron.core.dist_checkpointing, layout free.

Owns what is saved of the actor and how it comes back at another TP, PP, VPP or DP. When a checkpoint counts as written
is decided by `mrl/checkpoint.py`. A checkpoint's metadata is a pickle: before Megatron reads it, it is read here by an
unpickler that knows the classes of metadata and nothing else, so that a folder from elsewhere cannot run code. For the
same reason it holds tensors only: what torch calls bytes is unpickled without a question when it is loaded. `common.pt`
is read by Megatron with torch's weights-only unpickler.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from torch.distributed.checkpoint.api import CheckpointException

from mrl.errors import UserError
from mrl.megatron.optimizer_state import adapt, repair
from mrl.megatron.policy import Policy

OPTIMIZER_FORMAT = "fully_reshardable"
"""Megatron's default format is broken in 0.16.1 for tensors that are split; this one loads at any layout."""

METADATA_CLASSES = frozenset(
    {
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        # a rank's cached plan of what it wrote
        ("torch.distributed.checkpoint.planner", "SavePlan"),
        ("torch.distributed.checkpoint.planner", "WriteItem"),
        ("torch.distributed.checkpoint.planner", "WriteItemType"),
        ("torch.distributed.checkpoint.planner", "TensorWriteData"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "Path"),
    }
)
DTYPES = frozenset({"float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"})

EXTRA_STATE = "_extra_state"
"""Empty, or TransformerEngine's scales for fp8, which mrl does not use; Megatron would store it as a pickle."""

UNLOADABLE = (
    CheckpointingException,
    CheckpointException,  # torch's, not an Exception
    pickle.UnpicklingError,
    KeyError,
    RuntimeError,
    OSError,
    ValueError,
)


def save(folder: Path, policy: Policy) -> None:
    """Collective over the job: writes model, optimizer and the number of updates into a new folder."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    metadata = _metadata()
    group = metadata.pop("dp_cp_group")
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
    dist_checkpointing.save(_state(policy, is_loading=False), str(folder), strategy, content_metadata=metadata)


def load(folder: Path, policy: Policy) -> None:
    """Collective over the job: fills the actor, and its optimizer where it has one.

    Raises:
        UserError: The folder is no such checkpoint, or holds another model, or something that is not data.
    """
    refuse_code(folder / ".metadata")
    state = _state(policy, is_loading=True)
    group = _metadata()["dp_cp_group"]
    try:
        strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(folder)), group)
        loaded = dist_checkpointing.load(state, str(folder), strategy)
    except UNLOADABLE as error:
        raise UserError(
            f"checkpoint '{folder}' is damaged or does not fit the model of this config: {_reason(error)}. Use the "
            "model and actor sections it was written with, or an earlier checkpoint."
        ) from error
    for index, chunk in enumerate(policy.chunks):
        found = chunk.load_state_dict(loaded[_chunk_key(policy, index)], strict=False)
        wrong = [name for name in (*found.missing_keys, *found.unexpected_keys) if not name.endswith(EXTRA_STATE)]
        if wrong:
            raise RuntimeError(f"checkpoint '{folder}': Megatron loaded all but {', '.join(wrong)}")
    if policy.optimizer is not None:
        policy.optimizer.load_state_dict(adapt(loaded["optimizer"], policy.optimizer))
        policy.num_updates = int(loaded["num_updates"])


def _reason(error: BaseException) -> str:
    """One line: what went wrong first, on the first rank where it did."""
    if isinstance(error, CheckpointException):
        error = next(failure for failure, _ in error.failures.values())
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def refuse_code(file: Path) -> None:
    """Reads a metadata pickle with an unpickler that builds metadata classes only.

    Raises:
        UserError: The file is missing or unreadable, or asks for any other class or function.
    """
    if not file.is_file():
        raise UserError(f"'{file.parent}' is not a Megatron checkpoint: it has no {file.name}.")
    try:
        _MetadataOnly(io.BytesIO(file.read_bytes())).load()
    except UserError:
        raise
    except Exception as error:  # a broken pickle raises anything
        raise UserError(f"'{file}' cannot be read: {type(error).__name__}: {error}.") from error


class _MetadataOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in METADATA_CLASSES or (module == "torch" and name in DTYPES):
            return super().find_class(module, name)
        raise UserError(
            f"the checkpoint's metadata asks for '{module}.{name}', which is not data. It was not written by mrl or "
            "Megatron, and is not loaded."
        )


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": OPTIMIZER_FORMAT,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _state(policy: Policy, *, is_loading: bool) -> dict[str, Any]:
    metadata = _metadata()
    state: dict[str, Any] = {
        _chunk_key(policy, index): {
            name: value
            for name, value in chunk.sharded_state_dict(metadata=metadata).items()
            if not name.endswith(EXTRA_STATE)
        }
        for index, chunk in enumerate(policy.chunks)
    }
    if policy.optimizer is not None:
        repair()
        # the optimizer finds its parameters in the same dict
        state["optimizer"] = policy.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        state["num_updates"] = policy.num_updates
    return state


def _chunk_key(policy: Policy, index: int) -> str:
    return "model" if len(policy.chunks) == 1 else f"model{index}"
