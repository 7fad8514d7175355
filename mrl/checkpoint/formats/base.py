"""What a checkpoint format is: something to read by parts, and something to write file by file.

Owns the two interfaces that `mrl/commands/convert/convert.py` joins. Full Hugging Face tensors are the common
coordinates: a source reads any region of any of them, a target says of each tensor in each of its files which regions
it holds (`StoredTensor`). So N formats need N readers and N writers, and a conversion is one loop. No format knows
another one.
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
    """A model's weights on disk, open for reading; use it in a `with` block.

    Attributes:
        arch: The model.
        files: Every file that is read, for hashes; relative to `folder`.
        folder: Where they are.
    """

    arch: ArchSpec
    files: tuple[str, ...]
    folder: Path

    @abstractmethod
    def dtype(self, hf_name: str) -> str:
        """The dtype in which a Hugging Face tensor is stored, a name of `resharding/dtypes.py: DTYPES`."""

    @abstractmethod
    def read(self, hf_name: str, region: Region) -> Tensor:
        """A part of a Hugging Face tensor, in its stored dtype; a view of a mapped file where that is possible.

        Raises:
            UserError: The file ends early or cannot be read; it is named.
        """

    def view(self, hf_name: str, region: Region) -> Tensor | None:
        """What `read` returns where that is no copy made for it; None where the part must be put together first.

        Raises:
            UserError: As `read`.
        """
        return self.read(hf_name, region)

    def copy_into(self, tensor: Tensor, hf_name: str, region: Region) -> None:
        """Copies a part into `tensor`, with a cast to its dtype.

        Raises:
            UserError: As `read`.
        """
        tensor.copy_(self.read(hf_name, region))

    @abstractmethod
    def check(self) -> None:
        """Compares names, shapes and dtypes with what `arch` needs; reads headers only.

        Raises:
            UserError: Something is missing, unknown, of another shape or covered twice; it is named.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Format, parallel layout, tensors, bytes: what `tools/inspect_checkpoint.py` prints and a manifest records."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the files."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class OutFile:
    """One file of a target.

    Attributes:
        name: Relative to the target's folder.
        layout: Tensors in the order in which they are written, by their name in the file.
    """

    name: str
    layout: Layout


class Target(ABC):
    """A checkpoint that is to be written.

    Attributes:
        files: All files with weights. Each is written whole by one call of `write`, in any order and by any process.
    """

    files: tuple[OutFile, ...]

    @abstractmethod
    def write(self, path: Path, file: OutFile, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Writes one file; holds one tensor at a time in memory.

        Args:
            path: Where to write: a temporary name, renamed by the caller when this has returned.
            file: One of `files`.
            tensors: (name, tensor) in the order of `file.layout`, with its shapes and dtypes.

        Returns:
            What `finish` needs to know of this file, as JSON; with "num_bytes" and "xxh3" where the file was written
            through `OutputFile`, so that it need not be read again for its hash.
        """

    @abstractmethod
    def finish(self, folder: Path, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes everything that is not a weight: config, index, metadata.

        Args:
            folder: The target's folder, with all of `files` in it.
            records: File name -> what `write` returned.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Format and parallel layout, for the manifest."""
