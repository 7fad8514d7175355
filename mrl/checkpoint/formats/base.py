"""Interfaces of a checkpoint format: a source is read by regions, a target is written file by file.

`mrl/commands/convert/convert.py` joins them. Full Hugging Face tensors are the common coordinates: a source reads any
region of any of them; a target lists for each tensor of each file the regions that it contains (`StoredTensor`). So N
formats need N readers and N writers, and a conversion is one loop. Formats do not depend on each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mrl.models.base import ArchSpec
from mrl.resharding.layout import Layout, Region


class Source(ABC):
    """A model's weights on disk, open for reading; a context manager.

    Attributes:
        arch: The model.
        files: Paths, relative to `folder`, of every file that is read; for hashes.
        folder: Folder of the files.
    """

    arch: ArchSpec
    files: tuple[str, ...]
    folder: Path

    @abstractmethod
    def dtype(self, hf_name: str) -> str:
        """Returns the stored dtype of a Hugging Face tensor, a key of `resharding/dtypes.py: DTYPES`."""

    @abstractmethod
    def read(self, hf_name: str, region: Region) -> Tensor:
        """Reads a region of a Hugging Face tensor in its stored dtype; a view of a mapped file where possible.

        Raises:
            UserError: A file ends early or cannot be read; the message names it.
        """

    def view(self, hf_name: str, region: Region) -> Tensor | None:
        """Returns the region as a view of a mapped file; None if it has to be assembled from several parts.

        Raises:
            UserError: A file ends early or cannot be read; the message names it.
        """
        return self.read(hf_name, region)

    def copy_into(self, tensor: Tensor, hf_name: str, region: Region) -> None:
        """Copies a region into `tensor`, with a cast to its dtype.

        Raises:
            UserError: A file ends early or cannot be read; the message names it.
        """
        tensor.copy_(self.read(hf_name, region))

    @abstractmethod
    def check(self) -> None:
        """Compares names, shapes and dtypes with those that `arch` needs; reads headers only.

        Raises:
            UserError: A tensor is missing, unknown, of another shape or covered twice; the message names it.
        """

    def num_left_out(self) -> int:
        """Returns the number of tensors of layers for multi-token prediction, which are not read."""
        return 0

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Returns format, parallel layout, tensors and bytes, for `tools/inspect_checkpoint.py` and a manifest."""

    @abstractmethod
    def close(self) -> None:
        """Closes the files."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class OutFile:
    """One file of a target.

    Attributes:
        name: Path relative to the target's folder.
        layout: Tensors by their name in the file, in the order in which they are written.
    """

    name: str
    layout: Layout


class Target(ABC):
    """A checkpoint to write.

    Attributes:
        files: All files with weights. One call of `write` writes each completely, in any order and by any process.
        buffer_bytes: Memory that `write` needs besides the tensors that it is given.
    """

    files: tuple[OutFile, ...]
    buffer_bytes: int = 0

    @abstractmethod
    def write(self, path: Path, file: OutFile, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Writes one file; needs memory for one tensor at a time.

        Args:
            path: Temporary path; the caller renames it afterwards.
            file: One of `files`.
            tensors: (name, tensor) in the order of `file.layout`, with its shapes and dtypes.

        Returns:
            The file's record for `finish`, serializable as JSON; with "num_bytes" and "xxh3" if the file was written
                through
            `OutputFile`, so that it need not be read again for its hash.
        """

    @abstractmethod
    def finish(self, folder: Path, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes everything except weights: config, index, metadata.

        Args:
            folder: The target's folder, with all of `files` in it.
            records: File name -> return value of `write`.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Returns format and parallel layout, for the manifest."""
