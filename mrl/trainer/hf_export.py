"""The actor as a Hugging Face folder: config.json, sharded safetensors, tokenizer.

Owns `export_to_hf`; what such a folder holds is in `checkpoint/formats/hf.py`. The weights go from all ranks to the
writers by the same kind of plan as a refit, one file at a time: no rank holds more of the model than its own shard and
a file. The folder appears whole or not at all: it is written under another name and renamed last.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from mrl.checkpoint.formats.hf import assign_files, write_companions
from mrl.data.tokenizer import Tokenizer
from mrl.distributed.collectives import together
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.resharding.copy_op import Copy
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Layout
from mrl.resharding.plan import make_plan
from mrl.resharding.transfer import Transfer
from mrl.resharding.weight_slice import WeightSlice


def export_to_hf(
    folder: str | Path,
    arch: ArchSpec,
    layouts: Mapping[int, Layout],
    tensors: Mapping[str, Tensor],
    *,
    dtype: str,
    like: str | Path | None = None,
    max_file_bytes: int = 2 << 30,
    bucket_bytes: int = 256 << 20,
    writers: Sequence[int] = (0,),
) -> None:
    """Collective over the job: writes the model that the ranks hold together.

    Args:
        folder: To be made; must not exist.
        arch: The model.
        layouts: Rank -> what it holds (`megatron_layouts`), the same on every rank.
        tensors: What this rank holds, by the names of its layout.
        dtype: Of the files, "float32" or "bfloat16".
        like: Model folder whose tokenizer, generation settings and further config.json keys are copied; None: none.
        max_file_bytes: Largest safetensors file, unless one tensor is larger; also what a writer holds in memory.
        bucket_bytes: Largest staging buffer.
        writers: Ranks that write the files, in turn; all see the same file system.

    Raises:
        UserError: The folder exists, or cannot be written.
        RuntimeError: A rank failed; on every rank.
    """
    rank = dist.get_rank()
    target = Path(folder)
    partial = target.with_name(target.name + ".partial")
    with together(), _disk_errors():
        if rank == 0:
            _prepare(target, partial)
    files = assign_files(hf_layout(arch, dtype), max_file_bytes)
    writer_of = {file: writers[number % len(writers)] for number, file in enumerate(files)}
    wanted: dict[int, Layout] = {writer: {} for writer in writers}
    for file, content in files.items():
        wanted[writer_of[file]].update(content)
    copies = make_plan(layouts, wanted).copies
    names = list(files)
    for first in range(0, len(names), len(writers)):
        batch = {file: files[file] for file in names[first : first + len(writers)]}
        now = {name for content in batch.values() for name in content}
        due = [copy for copy in copies if copy.target_name in now]
        mine = {file: content for file, content in batch.items() if writer_of[file] == rank}
        _write_files(partial, mine, due, tensors, bucket_bytes)
    with together(), _disk_errors():
        if rank == 0:
            write_companions(partial, arch, files, None if like is None else Path(like))
            os.replace(partial, target)


def _write_files(
    folder: Path, mine: Mapping[str, Layout], copies: Sequence[Copy], tensors: Mapping[str, Tensor], bucket_bytes: int
) -> None:
    """Collective over the job: the copies arrive, and this rank writes its own files of them."""
    content = {name: stored for layout in mine.values() for name, stored in layout.items()}
    arrived = allocate(content)
    dtypes = {name: stored.dtype for name, stored in content.items()}
    Transfer(copies, tensors, dtypes, rank=dist.get_rank(), bucket_bytes=bucket_bytes).run(bind(_write, arrived))
    with together(), _disk_errors():
        for file in mine:
            save_file(arrived, folder / file, metadata={"format": "pt"})


def write_model_folder(
    folder: Path,
    arch: ArchSpec,
    dtype: str,
    tokenizer: Tokenizer,
    like: str | None = None,
    further: Mapping[str, Any] | None = None,
) -> None:
    """A Hugging Face folder without weights, for an engine that a refit fills; one that is there is kept in step.

    Its config.json has the structure as mrl read it, in the spellings of transformers 4 and 5: an engine that brings
    another version builds the same model.

    Args:
        folder: Made where it is not there.
        arch: The model.
        dtype: Of the weights.
        tokenizer: Of the model.
        like: Model folder whose generation settings and further config.json keys are copied; None: none.
        further: Keys of config.json that the engine wants besides; None: none.

    Raises:
        UserError: It cannot be written.
    """
    with _disk_errors():
        folder.mkdir(parents=True, exist_ok=True)
        files = assign_files(hf_layout(arch, dtype), sys.maxsize)
        write_companions(folder, arch, files, None if like is None else Path(like), further)
        tokenizer.save(folder)


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"the export cannot be written: {error}") from error


def _prepare(target: Path, partial: Path) -> None:
    if target.exists():
        raise UserError(f"the export folder '{target}' exists. Name a new one, or remove it.")
    if partial.exists():  # left by an export that was cut off
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _write(into: Mapping[str, Tensor], arrivals: Sequence[WeightSlice]) -> None:
    for item in arrivals:
        item.write_to(into[item.name])
