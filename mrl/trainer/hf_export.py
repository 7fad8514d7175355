"""Export of a sharded model as a Hugging Face folder: config.json, safetensors files, tokenizer.

Weights are sent from all ranks to the writing ranks with the same kind of plan as in a weight sync, one file at a time,
so no rank stores more than its own shard and one file. The folder is written under a temporary name and renamed at the
end. The format is in `checkpoint/formats/hf.py`.
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
from torch import Tensor

from mrl.checkpoint.formats.hf import assign_files, write_metadata_files
from mrl.checkpoint.formats.peft import check_new, write_peft_folder
from mrl.checkpoint.formats.safetensors_file import write_safetensors
from mrl.config.config import LoraConfig
from mrl.data.tokenizer import Tokenizer
from mrl.distributed.collectives import raise_on_all_ranks
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.resharding.copy_op import Copy
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.hf_names import Fused, join, written_together
from mrl.resharding.layout import Layout
from mrl.resharding.lora import peft_layout
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
    """Collective over the job: writes the model that is sharded over the ranks.

    Args:
        folder: Path of the new folder; must not exist.
        arch: Architecture of the model.
        layouts: Layout of the shard of each rank (`megatron_layouts`), the same on every rank.
        tensors: Tensors of this rank's shard, by the names in its layout.
        dtype: Data type of the files, "float32" or "bfloat16".
        like: Model folder to copy the tokenizer, generation settings and further config.json keys from; None: none.
        max_file_bytes: Largest safetensors file, bytes, unless a single tensor is larger; a writer needs so much
            memory.
        bucket_bytes: Largest staging buffer, bytes.
        writers: Ranks that write the files round-robin; all must see the same file system.

    Raises:
        UserError: The folder exists, or cannot be written.
        RuntimeError: Another rank failed.
    """
    rank = dist.get_rank()
    target = Path(folder)
    partial = target.with_name(target.name + ".partial")
    with raise_on_all_ranks(), _disk_errors():
        if rank == 0:
            _prepare(target, partial)
    fused = written_together(arch)
    files = assign_files(hf_layout(arch, dtype), max_file_bytes, fused)
    writer_of = {file: writers[number % len(writers)] for number, file in enumerate(files)}
    wanted: dict[int, Layout] = {writer: {} for writer in writers}
    for file, content in files.items():
        wanted[writer_of[file]].update(content)
    copies = make_plan(layouts, wanted).copies
    names = list(files)
    for first in range(0, len(names), len(writers)):
        batch = {file: files[file] for file in names[first : first + len(writers)]}
        names_now = {name for content in batch.values() for name in content}
        copies_now = [copy for copy in copies if copy.target_name in names_now]
        own = {file: content for file, content in batch.items() if writer_of[file] == rank}
        _write_files(partial, own, copies_now, tensors, bucket_bytes, fused)
    with raise_on_all_ranks(), _disk_errors():
        if rank == 0:
            write_metadata_files(partial, arch, files, None if like is None else Path(like))
            os.replace(partial, target)


def write_adapters(
    folder: str | Path,
    arch: ArchSpec,
    lora: LoraConfig,
    layouts: Mapping[int, Layout],
    tensors: Mapping[str, Tensor],
    *,
    base: str | None,
    bucket_bytes: int = 256 << 20,
) -> None:
    """Collective over the job: writes low-rank adapters that are sharded over the ranks as a PEFT folder.

    Args:
        folder: Path of the new folder; must not exist.
        arch: Architecture of the model.
        lora: Config section with rank, scale and modules.
        layouts: Layout of the adapters of each rank, the same on every rank.
        tensors: This rank's adapters, by the names in its layout.
        base: Name or path of the model; None: unknown.
        bucket_bytes: Largest staging buffer, bytes.

    Raises:
        UserError: The folder exists, or cannot be written.
        RuntimeError: Another rank failed.
    """
    with raise_on_all_ranks():
        if dist.get_rank() == 0:
            check_new(folder)
    dtype = next(stored.dtype for layout in layouts.values() for stored in layout.values())
    content = peft_layout(arch, lora, dtype)
    copies = make_plan(layouts, {0: content}).copies
    received = _receive(content if dist.get_rank() == 0 else {}, copies, tensors, bucket_bytes)
    with raise_on_all_ranks():
        if dist.get_rank() == 0:
            write_peft_folder(folder, arch, lora, received.__getitem__, base=base, dtype=dtype)


def _write_files(
    folder: Path,
    own: Mapping[str, Layout],
    copies: Sequence[Copy],
    tensors: Mapping[str, Tensor],
    bucket_bytes: int,
    fused: Fused | None = None,
) -> None:
    """Collective over the job: receives the tensors of the files in `own` and writes them."""
    content = {name: stored for layout in own.values() for name, stored in layout.items()}
    received = _receive(content, copies, tensors, bucket_bytes)
    arrived = ((name, received.pop(name)) for name in list(received))  # frees each as soon as it is joined
    stored = dict(join(arrived, fused or {}))
    with raise_on_all_ranks(), _disk_errors():
        for file in own:
            # Not safetensors' save_file, whose files only their owner can read. The writer expects wide dtypes first.
            ordered = sorted(stored.items(), key=lambda item: -item[1].element_size())
            shapes = {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in ordered}
            write_safetensors(folder / file, shapes, ordered, {"format": "pt"})


def _receive(
    content: Layout, copies: Sequence[Copy], tensors: Mapping[str, Tensor], bucket_bytes: int
) -> dict[str, Tensor]:
    """Collective over the job: returns the tensors of a layout, in host memory."""
    received = allocate(content)
    dtypes = {name: stored.dtype for name, stored in content.items()}
    Transfer(copies, tensors, dtypes, rank=dist.get_rank(), bucket_bytes=bucket_bytes).run(bind(_write, received))
    return received


def write_model_folder(
    folder: Path,
    arch: ArchSpec,
    dtype: str,
    tokenizer: Tokenizer,
    like: str | None = None,
    further: Mapping[str, Any] | None = None,
) -> None:
    """Writes a Hugging Face folder without weights, for an engine that gets its weights by a weight sync.

    The config.json describes the architecture with the keys of both transformers 4 and 5, so that an engine with
    another transformers version builds the same model.

    Args:
        folder: Folder to create or overwrite.
        arch: Architecture of the model.
        dtype: Data type of the weights.
        tokenizer: Tokenizer to save.
        like: Model folder to copy the generation settings and further config.json keys from; None: none.
        further: Additional config.json keys for the engine; None: none.

    Raises:
        UserError: The folder cannot be written.
    """
    with _disk_errors():
        folder.mkdir(parents=True, exist_ok=True)
        files = assign_files(hf_layout(arch, dtype), sys.maxsize)
        write_metadata_files(folder, arch, files, None if like is None else Path(like), further)
        tokenizer.save(folder)


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"Cannot write the Hugging Face export: {error}") from error


def _prepare(target: Path, partial: Path) -> None:
    if target.exists():
        raise UserError(f"The export folder '{target}' exists already. Choose a new folder, or remove this one.")
    if partial.exists():  # left by an interrupted export
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _write(into: Mapping[str, Tensor], arrivals: Sequence[WeightSlice]) -> None:
    for item in arrivals:
        item.write_to(into[item.name])
