"""Reduced copies of files that a config names: model folders with random weights, the first rows of data files.

The ranks of a rehearsal read real folders and files in the config's formats.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

from safetensors.torch import save_file

from mrl.checkpoint.formats.hf import assign_files, write_metadata_files
from mrl.config.config import DataConfig
from mrl.data.hub_files import paths_of
from mrl.models.base import ArchSpec
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.hf_names import join, written_together
from mrl.resharding.random_init import random_init

ROWS = 64
"""Rows kept of each training file."""
MAX_FILE_BYTES = 1 << 40


def write_model(folder: Path, arch: ArchSpec, *, dtype: str, seed: int, like: Path) -> None:
    """Writes a Hugging Face folder with random weights.

    Args:
        folder: Folder to create.
        arch: Model.
        dtype: Data type of the weights.
        seed: Seed of the weights.
        like: Folder to copy the tokenizer and further config.json keys from.
    """
    layout = hf_layout(arch, dtype)
    tensors = allocate(layout)
    random_init(arch, layout, tensors, seed)
    folder.mkdir(parents=True)
    fused = written_together(arch)
    files = assign_files(layout, MAX_FILE_BYTES, fused)
    for name, part in files.items():
        stored = dict(join(((key, tensors[key]) for key in part), fused))
        save_file(stored, folder / name, metadata={"format": "pt"})
    write_metadata_files(folder, arch, files, like)


def with_first_rows(data: DataConfig, folder: Path) -> DataConfig:
    """Copies the first rows of each entry's first file to `folder`; returns the data settings with these copies."""
    folder.mkdir(parents=True, exist_ok=True)
    copied: dict[str, list[str]] = {}
    for side, rows in (("train", ROWS), ("val", 2)):
        copied[side] = []
        for number, text in enumerate(getattr(data, f"{side}_files")):
            file = Path(paths_of(text, side)[0])
            target = folder / f"{side}-{number}{file.suffix}"
            _copy_rows(file, target, rows)
            copied[side].append(str(target))
    return replace(data, train_files=copied["train"], val_files=copied["val"])


def _copy_rows(source: Path, target: Path, count: int) -> None:
    if source.suffix == ".parquet":
        import pyarrow.parquet

        first = next(pyarrow.parquet.ParquetFile(source).iter_batches(batch_size=count))
        pyarrow.parquet.write_table(pyarrow.Table.from_batches([first]), target)
        return
    with source.open("rb") as lines, target.open("wb") as copy:
        copy.writelines(islice((line for line in lines if line.strip()), count))
