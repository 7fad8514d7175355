"""An actor or a critic in a folder: model and optimizer through megatron.core.dist_checkpointing, layout free.

Owns what is saved of it and how it comes back at another TP, PP, VPP or DP. When a checkpoint counts as written is
decided by `mrl/checkpoint/run_dir/checkpoint.py`; without Megatron the folder is read by
`mrl/checkpoint/formats/megatron.py`. Its metadata is a pickle: before Megatron reads it, it is read by an unpickler
that knows the classes of metadata and nothing else, so that a folder from elsewhere cannot run code. For the same
reason what is loaded is tensors only: what torch calls bytes is unpickled without a question; the extra states of
modules, which may be such, are not loaded. `common.pt` is read by Megatron with torch's weights-only unpickler.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mrl.checkpoint.formats.checkpoint_metadata import METADATA, read_metadata
from mrl.checkpoint.run_dir.checkpoint import hash_file
from mrl.checkpoint.run_dir.manifest import File
from mrl.distributed.groups import ProcessGroups
from mrl.errors import UserError
from mrl.megatron.optimizer import optimizer_tensors
from mrl.megatron.optimizer_state import take_up, to_load, to_save
from mrl.megatron.trainable import Trainable
from mrl.models.hf_config import family_of
from mrl.resharding.dist_checkpoint import EXTRA_STATE

UNLOADABLE = (
    CheckpointingException,
    CheckpointException,  # torch's, not an Exception
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What Megatron and torch raise over a folder whose metadata or common.pt says something else than it should."""


ERRNO = re.compile(r"\[Errno (\d+)\]")
ZIP_WRITER = re.compile("inline_container|iostream error|PytorchStreamWriter")
"""How torch.save tells that a file does not take what it writes."""

FULL_BYTES = 1 << 20
"""A disk with less room takes no file of a checkpoint: what is left is what the last write did not fit into."""


class Saver:
    """Saves one model again and again.

    Who writes which shard is agreed on once, and checked: each element has one writer. What the ranks plan is gathered
    until it was the same twice; later saves exchange only where in the files the shards went.
    """

    def __init__(self, policy: Trainable) -> None:
        """Args: policy: An actor or a critic; its parameters stay where they are."""
        self._policy = policy
        self._strategy: Any = None
        self._had_optimizer = False

    def begin(self, folder: Path, *, beside: bool = False) -> Writing:
        """Collective over the job: model, optimizer, the number of updates and config.json go into a new folder.

        Args:
            folder: To be made; it is a checkpoint once the result's `finish` has returned.
            beside: A thread writes copies in host memory while the caller goes on; otherwise all is written now.

        Raises:
            OSError: A disk does not take it; only on the rank that wrote, the others may wait for it.
        """
        with self._policy.groups.among_trainers():
            return self._begin(folder, beside=beside)

    def _begin(self, folder: Path, *, beside: bool) -> Writing:
        policy = self._policy
        policy.bring("weights", "optimizer")
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        metadata = _metadata()
        group = metadata.pop("dp_cp_group")
        first = self._strategy is None or self._had_optimizer != (policy.optimizer is not None)
        if first:
            self._strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
            if group.size() > 1:
                self._strategy = FullyParallelSaveStrategyWrapper(self._strategy, group, do_cache_distribution=True)
            self._had_optimizer = policy.optimizer is not None
        state = _model_state(policy)
        if policy.optimizer is not None:
            state["optimizer"] = to_save(policy.optimizer, state, _metadata())
            state["num_updates"] = policy.num_updates
        with _disk_errors(folder):
            request = dist_checkpointing.save(
                state,
                str(folder),
                self._strategy,
                content_metadata=metadata,
                validate_access_integrity=first,
                async_sharded_save=True,
            )
        if dist.get_rank() == 0:
            arch = policy.chunks[0].arch
            config = family_of(arch).arch_to_hf(arch)
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return Writing(folder, request, _memory(policy) if beside else None, policy.groups)


class Writing:
    """A checkpoint on its way to the disk: copies of this rank's shards, written to its own files.

    Megatron forks a process for it. Here it is a thread of the rank: it dies with the rank, it needs no second image of
    a process that holds a device and sockets, and both writing and hashing leave Python to others.

    Attributes:
        seconds: What the files took, hashes with them, s; 0 until they are written.
    """

    def __init__(self, folder: Path, request: Any, memory: set[int] | None, groups: ProcessGroups) -> None:
        """Writes, or begins to.

        Args:
            folder: Of the checkpoint.
            request: Megatron's AsyncRequest.
            memory: Storages that training writes to: of what lies there copies are made, and a thread writes; None: all
                is written before this returns.
            groups: Who writes.
        """
        self.seconds = 0.0
        self._groups = groups
        self._dropped = threading.Event()
        self._folder, self._finalize = folder, request.finalize_fns
        self._hashes: dict[Path, File] = {}
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if request.async_fn is None:  # nothing to write on this rank
            return
        rank, _, results = request.async_fn_args
        buckets = request.preload_fn()
        if memory is None:
            request.async_fn(rank, buckets, results)
            return
        buckets = [_apart(bucket, memory, self._dropped) for bucket in buckets]
        write = partial(request.async_fn, rank, buckets, results)
        self._thread = threading.Thread(target=self._run, args=(write, [Path(file) for file, _, _ in buckets]))
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether this rank's files are written, or cannot be."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> dict[Path, File]:
        """Collective over the job: waits for the files of all ranks, and makes a checkpoint of them.

        Returns:
            This rank's files whose hashes were taken when they were written.

        Raises:
            OSError: As for `Saver.begin`.
        """
        if self._thread is not None:
            self._thread.join()
        with _disk_errors(self._folder), self._groups.among_trainers():
            for finalize in self._finalize:
                finalize()
        if self._error is not None:
            raise self._error
        return self._hashes

    def drop(self) -> None:
        """Gives this rank's files up: none is written to when this returns, and there will be no checkpoint."""
        self._dropped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, write: Callable[[], None], files: list[Path]) -> None:
        began = time.monotonic()
        try:
            write()
            self._hashes = {file: hash_file(file) for file in files if not self._dropped.is_set()}
        except Exception as error:  # noqa: BLE001 -- `finish` raises it
            self._error = error
        self.seconds = time.monotonic() - began


class Writings:
    """Several checkpoints on their way to the disk, as one."""

    def __init__(self, each: Sequence[Writing]) -> None:
        """Args: each: In the same order on all ranks that train; none on the others."""
        self._each = each

    @property
    def seconds(self) -> float:
        """What the files took that took longest."""
        return max((writing.seconds for writing in self._each), default=0.0)

    @property
    def is_done(self) -> bool:
        """Whether this rank's files are written, or cannot be."""
        return all(writing.is_done for writing in self._each)

    def finish(self) -> dict[Path, File]:
        """Collective over the job: as `Writing.finish`."""
        return {path: file for writing in self._each for path, file in writing.finish().items()}

    def drop(self) -> None:
        """As `Writing.drop`."""
        for writing in self._each:
            writing.drop()


def save(folder: Path, policy: Trainable) -> None:
    """Collective over the job: one save, whole when this returns."""
    Saver(policy).begin(folder).finish()


def _memory(policy: Trainable) -> set[int]:
    """Where the model's weights and its optimizer's state lie."""
    tensors = [*policy.named_tensors().values()]
    if policy.optimizer is not None:
        tensors += optimizer_tensors(policy.optimizer)
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class DroppedError(Exception):
    """A checkpoint was given up while it was written."""


def _apart(bucket: Any, memory: set[int], dropped: threading.Event) -> Any:
    """Megatron's bucket of a file; what lies in `memory` is copied. Writing it ends where it is dropped."""
    file, key, (objects, tensors) = bucket
    copies = [
        (item, tensor.clone() if tensor.untyped_storage().data_ptr() in memory else tensor) for item, tensor in tensors
    ]
    return file, key, (objects, _until(dropped, copies))


def _until(dropped: threading.Event, items: list[Any]) -> Iterator[Any]:
    for item in items:
        if dropped.is_set():
            raise DroppedError
        yield item


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Megatron quotes an OSError in errors of its own, and torch's zip writer has none: inside, they are OSErrors."""
    try:
        yield
    except (CheckpointException, RuntimeError) as error:
        failures = [each for each, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        if not failures:
            raise RuntimeError("the checkpoint failed on another rank") from error
        text = str(failures[0])
        quoted = ERRNO.search(text)
        number = int(quoted[1]) if quoted else errno.EIO if ZIP_WRITER.search(text) else 0
        if not number:
            raise RuntimeError(_reason(error)) from error
        if not quoted and _is_full(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise OSError(number, os.strerror(number) if quoted else f"torch.save: {text}", str(folder)) from error


def _is_full(folder: Path) -> bool:
    """Whether the disk of a folder took no more, which torch.save may tell as a position in its file."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize < FULL_BYTES


def load(folder: Path, policy: Trainable) -> None:
    """Collective over the job: fills a model, and its optimizer where it has one.

    Raises:
        UserError: The folder is no such checkpoint, or holds another model, or something that is not data.
    """
    saved = refuse_code(folder / METADATA)
    with policy.groups.among_trainers():
        _load(folder, policy, saved)


def _load(folder: Path, policy: Trainable, saved: list[str]) -> None:
    policy.bring("weights", "optimizer")
    state = _model_state(policy)
    if policy.optimizer is not None:
        state["moments"] = to_load(policy.optimizer, state, _metadata(), saved)
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
        wrong = [name for name in (*found.missing_keys, *found.unexpected_keys) if EXTRA_STATE not in name]
        if wrong:
            raise RuntimeError(f"checkpoint '{folder}': Megatron loaded all but {', '.join(wrong)}")
    if policy.optimizer is not None:
        policy.num_updates = int(loaded["num_updates"])
        take_up(policy.optimizer, loaded["moments"], policy.num_updates)


def _reason(error: BaseException) -> str:
    """One line: what went wrong first, on the first rank where it did."""
    if isinstance(error, CheckpointException):
        error = next(failure for failure, _ in error.failures.values())
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def refuse_code(file: Path) -> list[str]:
    """Names of the checkpoint's tensors, from its metadata; refuses what torch would unpickle as any object.

    Raises:
        UserError: The file is missing or unreadable, asks for code, or has a pickled object in place of a tensor.
    """
    found = read_metadata(file).state_dict_metadata
    for key, stored in found.items():
        if not isinstance(stored, TensorStorageMetadata) and EXTRA_STATE not in key:
            raise UserError(
                f"'{file}': '{key}' is a pickled object ({type(stored).__name__}), which is not data. It was not "
                "written by mrl, and is not loaded."
            )
    return list(found)


def _metadata() -> dict[str, Any]:
    return {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _model_state(policy: Trainable) -> dict[str, Any]:
    metadata = _metadata()
    return {
        _chunk_key(policy, index): {
            name: value
            for name, value in chunk.sharded_state_dict(metadata=metadata).items()
            if EXTRA_STATE not in name  # grouped linears number theirs: _extra_state, _extra_state1, ...
        }
        for index, chunk in enumerate(policy.chunks)
    }


def _chunk_key(policy: Trainable, index: int) -> str:
    return "model" if len(policy.chunks) == 1 else f"model{index}"
