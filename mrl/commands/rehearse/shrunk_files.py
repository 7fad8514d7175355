"""Small copies of what a config names on disk: a model folder with random weights, the first rows of data files.

Owns their writing, so that ranks read real folders and files of the kind that the config has.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

from safetensors.torch import save_file

from mrl.checkpoint.formats.hf import assign_files, write_companions
from mrl.config.config import DataConfig
from mrl.models.base import ArchSpec
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.init import random_init

ROWS = 64
"""Rows of each data file that are kept."""
MAX_FILE_BYTES = 1 << 40


def write_model(folder: Path, arch: ArchSpec, *, dtype: str, seed: int, like: Path) -> None:
    """A Hugging Face folder with random weights.

    Args:
        folder: To be made.
        arch: The model.
        dtype: Of the weights.
        seed: Of the weights.
        like: Folder whose tokenizer and further config.json keys come along.
    """
    layout = hf_layout(arch, dtype)
    tensors = allocate(layout)
    random_init(arch, layout, tensors, seed)
    folder.mkdir(parents=True)
    files = assign_files(layout, MAX_FILE_BYTES)
    for name, part in files.items():
        save_file({key: tensors[key] for key in part}, folder / name, metadata={"format": "pt"})
    write_companions(folder, arch, files, like)


def with_first_rows(data: DataConfig, folder: Path) -> DataConfig:
    """The same data settings with files that hold the first rows only.

    Args:
        data: Its files exist and were checked.
        folder: Where the new files go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copied: dict[str, list[str]] = {}
    for side, rows in (("train", ROWS), ("val", 2)):
        copied[side] = []
        for number, file in enumerate(getattr(data, f"{side}_files")):
            target = folder / f"{side}-{number}{Path(file).suffix}"
            _copy_rows(Path(file), target, rows)
            copied[side].append(str(target))
    return replace(data, train_files=copied["train"], val_files=copied["val"])


def _copy_rows(source: Path, target: Path, count: int) -> None:
    if source.suffix == ".parquet":
        import pyarrow.parquet

        first = next(pyarrow.parquet.ParquetFile(source).iter_batches(batch_size=count))
        pyarrow.parquet.write_table(pyarrow.Table.from_batches([first]), target)
        return
    with source.open("rb") as lines, target.open("wb") as kept:
        kept.writelines(islice((line for line in lines if line.strip()), count))
