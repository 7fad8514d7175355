"""Checkpoints of a model and its optimizer through megatron.core.dist_checkpointing, independent of the layout.

They load at any TP, PP, VPP or DP. `mrl/checkpoint/run_dir/checkpoint.py` decides when a checkpoint is complete;
`mrl/checkpoint/formats/megatron.py` reads the folder without Megatron.

Loading must not execute code from a foreign folder. Its metadata is a pickle, so an unpickler that allows only metadata
classes reads it before Megatron does. Only tensors are loaded: torch unpickles "bytes" entries without checks, and
modules' extra states, which may be such, are skipped. Megatron reads `common.pt` with torch's weights-only unpickler.
"""

from __future__ import annotations

import errno
import inspect
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

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mrl.checkpoint.formats.checkpoint_metadata import COMMON_STATE, METADATA, read_metadata
from mrl.checkpoint.formats.megatron import ADAPTERS
from mrl.checkpoint.formats.torch_dist import COMMON
from mrl.checkpoint.run_dir.checkpoint import sha256_file
from mrl.checkpoint.run_dir.manifest import FileRecord, read_json_object
from mrl.distributed.groups import ProcessGroups
from mrl.errors import UserError, shown
from mrl.megatron.model import ScoringModel
from mrl.megatron.optimizer import optimizer_tensors
from mrl.megatron.optimizer_state import restore, to_load, to_save
from mrl.megatron.trainable_model import TrainableModel
from mrl.models.hf_config import family_of
from mrl.resharding.dist_checkpoint import EXTRA_STATE
from mrl.resharding.megatron import OUTPUT

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
"""Errors that Megatron and torch raise if the metadata or common.pt are inconsistent."""

_OWN_WRITER = (
    {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}
)
"""Arguments for `dist_checkpointing.save` that choose Megatron's own writer, which is not the default from 0.17 on."""


ERRNO = re.compile(r"\[Errno (\d+)\]")
"""Error number quoted in an error message."""
ZIP_WRITER = re.compile("inline_container|iostream error|PytorchStreamWriter")
"""Words of torch.save's errors if a file cannot be written."""

FULL_BYTES = 1 << 20
"""Free space, bytes, below which a disk counts as full after a failed write."""


class Saver:
    """Saves one model repeatedly.

    The assignment of shards to writing ranks is agreed on once and validated: each element has one writer. The ranks'
    plans are gathered until they were the same twice; later saves exchange only the shards' offsets in the files.
    """

    def __init__(self, model: TrainableModel) -> None:
        """Stores the model, an actor or a critic."""
        self._model = model
        self._strategy: Any = None
        self._had_optimizer = False

    def begin(self, folder: Path, *, async_save: bool = False) -> ShardWriter:
        """Collective over the job: starts to save model, optimizer, update count and config.json into a new folder.

        Args:
            folder: Folder to create; it is a checkpoint once `finish` of the result has returned.
            async_save: True if a thread writes copies in host memory while the caller continues; otherwise everything
                is written before the return.

        Raises:
            OSError: The disk cannot be written; raised only on the rank that wrote, while others may wait for it.
        """
        with self._model.groups.trainers_as_world():
            return self._begin(folder, async_save=async_save)

    def _begin(self, folder: Path, *, async_save: bool) -> ShardWriter:
        policy = self._model
        policy.onload("weights", "optimizer")
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        metadata = _metadata()
        group = metadata.pop("dp_cp_group")
        first = self._strategy is None or self._had_optimizer != (policy.optimizer is not None)
        if first:
            self._strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=2, cached_metadata=True)
            if group.size() > 1:
                self._strategy = FullyParallelSaveStrategyWrapper(self._strategy, group, do_cache_distribution=True)
            self._had_optimizer = policy.optimizer is not None
        state = _model_state(policy)
        if policy.optimizer is not None:
            state["optimizer"] = to_save(policy.optimizer, state, _metadata())
            state["num_updates"] = policy.num_updates
            if policy.num_skipped:
                state["num_skipped"] = policy.num_skipped
        adapters = None if policy.adapters is None else _describe_adapters(policy)
        with _disk_errors(folder):
            request = dist_checkpointing.save(
                state,
                str(folder),
                self._strategy,
                content_metadata=metadata,
                validate_access_integrity=first,
                async_sharded_save=True,
                **_OWN_WRITER,
            )
            if dist.get_rank() == 0 and not (folder / COMMON).exists():
                # 0.19 writes none, and older versions cannot load a checkpoint without it
                common = {name: value for name, value in state.items() if isinstance(value, int)}
                torch.save({**common, "content_metadata": metadata}, folder / COMMON)
        if dist.get_rank() == 0:
            arch = policy.chunks[0].arch
            config = family_of(arch).arch_to_hf(arch)
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            if adapters is not None:
                (folder / ADAPTERS).write_text(json.dumps(adapters, indent=2) + "\n")
        return ShardWriter(folder, request, _training_storages(policy) if async_save else None, policy.groups)


class ShardWriter:
    """A checkpoint being written: copies of this rank's shards go to its own files.

    Megatron forks a process for this. Here a thread of the rank does it: it ends with the rank, needs no copy of a
    process with a device and sockets, and releases the GIL for writing and hashing.

    Attributes:
        seconds: Duration of writing and hashing, s; 0 until it ends.
    """

    def __init__(self, folder: Path, request: Any, memory: set[int] | None, groups: ProcessGroups) -> None:
        """Writes the files, or starts a thread that does.

        Args:
            folder: Folder of the checkpoint.
            request: Megatron's AsyncRequest.
            memory: Addresses of the storages that training writes to; tensors in them are copied, and a thread writes.
                None: everything is written before the return.
            groups: Process groups of the ranks that save.
        """
        self.seconds = 0.0
        self._groups = groups
        self._dropped = threading.Event()
        self._folder, self._finalize = folder, request.finalize_fns
        self._hashes: dict[Path, FileRecord] = {}
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if request.async_fn is None:  # nothing to write on this rank
            return
        rank, _, results = request.async_fn_args
        buckets = request.preload_fn()
        if memory is None:
            request.async_fn(rank, buckets, results)
            return
        buckets = [_copy_live_tensors(bucket, memory, self._dropped) for bucket in buckets]
        write = partial(request.async_fn, rank, buckets, results)
        self._thread = threading.Thread(target=self._run, args=(write, [Path(file) for file, _, _ in buckets]))
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """True if writing this rank's files has ended, successfully or not."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> dict[Path, FileRecord]:
        """Collective over the job: waits for the files of all ranks and completes the checkpoint.

        Returns:
            This rank's files that were hashed while written.

        Raises:
            OSError: The disk cannot be written, see `Saver.begin`.
        """
        if self._thread is not None:
            self._thread.join()
        with _disk_errors(self._folder), self._groups.trainers_as_world():
            for finalize in self._finalize:
                finalize()
        if self._error is not None:
            raise self._error
        return self._hashes

    def cancel(self) -> None:
        """Cancels the write: no file is written to after the return, and the folder never becomes a checkpoint."""
        self._dropped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, write: Callable[[], None], files: list[Path]) -> None:
        began = time.monotonic()
        try:
            write()
            self._hashes = {file: sha256_file(file) for file in files if not self._dropped.is_set()}
        except Exception as error:  # noqa: BLE001 -- `finish` raises it
            self._error = error
        self.seconds = time.monotonic() - began


class PendingWrites:
    """Several checkpoints being written, handled as one."""

    def __init__(self, each: Sequence[ShardWriter]) -> None:
        """Stores the writes, in the same order on all training ranks; none on other ranks."""
        self._each = each

    @property
    def seconds(self) -> float:
        """Duration of the slowest write, s."""
        return max((writing.seconds for writing in self._each), default=0.0)

    @property
    def is_done(self) -> bool:
        """True if writing this rank's files has ended, successfully or not."""
        return all(writing.is_done for writing in self._each)

    def finish(self) -> dict[Path, FileRecord]:
        """Collective over the job: finishes each, see `ShardWriter.finish`."""
        return {path: file for writing in self._each for path, file in writing.finish().items()}

    def cancel(self) -> None:
        """Cancels all writes."""
        for writing in self._each:
            writing.cancel()


def save(folder: Path, policy: TrainableModel) -> None:
    """Collective over the job: saves a checkpoint, which is complete at the return."""
    Saver(policy).begin(folder).finish()


def _training_storages(policy: TrainableModel) -> set[int]:
    """Returns the addresses of the storages of the model's weights and its optimizer's state."""
    tensors = [*policy.named_tensors().values(), *policy.trained_tensors().values()]
    if policy.optimizer is not None:
        tensors += optimizer_tensors(policy.optimizer)
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class DroppedError(Exception):
    """Raised in the writing thread when the checkpoint is cancelled."""


def _copy_live_tensors(bucket: Any, memory: set[int], dropped: threading.Event) -> Any:
    """Returns Megatron's bucket of a file with tensors in `memory` copied, whose iteration ends when dropped."""
    file, key, (objects, tensors) = bucket
    copies = [
        (item, tensor.clone() if tensor.untyped_storage().data_ptr() in memory else tensor) for item, tensor in tensors
    ]
    return file, key, (objects, _until_dropped(dropped, copies))


def _until_dropped(dropped: threading.Event, items: list[Any]) -> Iterator[Any]:
    for item in items:
        if dropped.is_set():
            raise DroppedError
        yield item


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Raises write errors inside as OSErrors: Megatron only quotes them, torch's zip writer raises RuntimeErrors."""
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
    """Returns whether the folder's disk is full; torch.save may report this only as a wrong position in its file."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize < FULL_BYTES


def load(folder: Path, policy: TrainableModel) -> None:
    """Collective over the job: loads a model, and its optimizer if it has one.

    Raises:
        UserError: The folder is no such checkpoint, is of another model, or contains pickled objects.
    """
    saved = read_safe_metadata(folder / METADATA)
    with policy.groups.trainers_as_world():
        _load(folder, policy, saved)


def _load(folder: Path, policy: TrainableModel, saved: list[str]) -> None:
    policy.onload("weights", "optimizer")
    _check_adapters(folder, policy)
    state = _model_state(policy)
    if policy.optimizer is not None:
        state["moments"] = to_load(policy.optimizer, state, _metadata(), saved)
    group = _metadata()["dp_cp_group"]
    try:
        strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), group)
        loaded = dist_checkpointing.load(state, str(folder), strategy)
    except UNLOADABLE as error:
        raise UserError(
            f"checkpoint '{folder}' is damaged or does not fit the model of this config: {_reason(error)}. Use the "
            "model and actor sections it was written with, or an earlier checkpoint."
        ) from error
    for index, chunk in enumerate(policy.chunks):
        found = chunk.load_state_dict(loaded[_chunk_key(policy, index)], strict=False)
        missing = found.missing_keys if policy.adapters is None else []  # the model's own weights are not in it
        wrong = [name for name in (*missing, *found.unexpected_keys) if EXTRA_STATE not in name]
        if wrong:
            raise RuntimeError(f"checkpoint '{folder}': Megatron did not load {', '.join(wrong)}")
    if policy.optimizer is not None:
        policy.num_updates, policy.num_skipped = int(loaded["num_updates"]), int(loaded.get("num_skipped", 0))
        restore(policy.optimizer, loaded["moments"], policy.num_updates - policy.num_skipped)


def _reason(error: BaseException) -> str:
    """Returns one line about the first error, of the first rank with one."""
    if isinstance(error, CheckpointException):
        error = next(failure for failure, _ in error.failures.values())
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def read_safe_metadata(file: Path) -> list[str]:
    """Returns the names of the checkpoint's tensors from its metadata; rejects entries that torch would unpickle.

    Raises:
        UserError: The file is missing or unreadable, contains code, or has a pickled object in place of a tensor.
    """
    found = read_metadata(file).state_dict_metadata
    for key, stored in found.items():
        if not isinstance(stored, TensorStorageMetadata) and EXTRA_STATE not in key and key != COMMON_STATE:
            raise UserError(
                f"'{file}': '{key}' is a pickled object ({type(stored).__name__}), expected a tensor. mrl did not "
                "write this file and does not load it."
            )
    return list(found)


def _metadata() -> dict[str, Any]:
    return {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _describe_adapters(policy: TrainableModel) -> dict[str, Any]:
    """Collective over the training ranks: returns what a run that continues with these adapters must agree with."""
    if policy.adapters is None:
        raise RuntimeError("the model has no adapters")
    return policy.adapters.describe() | {"base_checksum": policy.base_checksum()}


def _check_adapters(folder: Path, policy: TrainableModel) -> None:
    """Collective over the training ranks: checks that a checkpoint's adapters are those of the config.

    Raises:
        UserError: Only one of them has adapters, or rank, scale, modules or the model itself differ.
    """
    saved = read_json_object(folder, ADAPTERS) if (folder / ADAPTERS).is_file() else None
    if (saved is None) != (policy.adapters is None):
        key = f"{policy.section}.lora"
        has, wants = ("only adapters", f"{key}.rank=0") if saved else ("no adapters", f"{key}.rank above 0")
        raise UserError(
            f"checkpoint '{folder}' has {has}, but the config has {wants}. Set {key} as it was, or start a new "
            "run.output_dir; its Hugging Face export can be the new model.path."
        )
    if saved is None:
        return
    own = _describe_adapters(policy)
    compared = ("rank", "scale", "modules", "share_expert_adapters", "base_checksum")
    changed = [key for key in compared if saved.get(key) != own.get(key)]
    if "modules" in changed:  # a hash, which says nothing
        changed = [*(key for key in changed if key != "modules"), "target_modules", "exclude_modules"]
    if changed:
        what = ", ".join(f"{key} was {shown(saved.get(key))} and is {shown(own.get(key))}" for key in changed)
        raise UserError(
            f"checkpoint '{folder}' has adapters for another model or with other settings: {what}. Set "
            f"{policy.section}.lora and the model as they were, or start a new run.output_dir."
        )


def _model_state(policy: TrainableModel) -> dict[str, Any]:
    metadata = _metadata()
    if policy.adapters is not None:
        return {
            _chunk_key(policy, index): {
                **policy.adapters.sharded_state_dict(index, metadata["dp_cp_group"]),
                **_value_head(chunk, metadata),
            }
            for index, chunk in enumerate(policy.chunks)
        }
    return {
        _chunk_key(policy, index): {
            name: value
            for name, value in chunk.sharded_state_dict(metadata=metadata).items()
            if EXTRA_STATE not in name  # grouped linears number theirs: _extra_state, _extra_state1, ...
        }
        for index, chunk in enumerate(policy.chunks)
    }


def _value_head(chunk: ScoringModel, metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the value head of a critic with adapters: the only other parameter that is trained."""
    if not (chunk.arch.value_head and chunk.post_process):
        return {}
    return {OUTPUT: chunk.sharded_state_dict(metadata=metadata)[OUTPUT]}


def _chunk_key(policy: TrainableModel, index: int) -> str:
    return "model" if len(policy.chunks) == 1 else f"model{index}"
