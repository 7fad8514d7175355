"""Files of a distributed checkpoint: global tensors as boxes, each box a `torch.save` blob in a `.distcp` file.

Reads and writes `.metadata` (a pickle of torch.distributed.checkpoint's `Metadata`: boxes and their locations),
`metadata.json`, `common.pt` and the blobs, compatible with megatron-core 0.16.1's "torch_dist" backend. It knows no
model, and needs no process group and no Megatron.

A checkpoint from elsewhere must not run code. `checkpoint_metadata.py` reads `.metadata`, and a blob's unpickler
accepts a tensor's description only. Entries that torch calls bytes (any pickled object: random states, extra states)
and `common.pt` are never read.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from mrl.checkpoint.formats.checkpoint_metadata import METADATA, read_metadata
from mrl.checkpoint.formats.torch_blob import ALIGNMENT, BlobTensor, InvalidBlobError, blob_parts, read_blob
from mrl.checkpoint.io.atomic_files import write_file
from mrl.errors import UserError
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.layout import Region
from mrl.resharding.regions import full_region, intersect, volume

BACKEND_FILE = "metadata.json"
COMMON = "common.pt"
_EMPTY_FILE = "__empty.distcp"
"""File with a pickled None, to which keys without data refer."""

_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_MAPPED_BYTES = 32 << 20
"""Bytes after which files are mapped again, because pages that were read count as this process's memory until then."""


@dataclass(frozen=True)
class Chunk:
    """A box of a global tensor, and the location of its blob.

    Attributes:
        offsets: First index of the box in each dimension.
        sizes: Extent of the box.
        file: Path relative to the checkpoint's folder.
        start: Offset of the blob in the file, bytes.
        num_bytes: Size of the blob.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int

    @property
    def region(self) -> Region:
        """Region of the box in the global tensor."""
        return tuple((offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class GlobalTensor:
    """A tensor of the checkpoint; `dtype` is torch's name of its dtype."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    def chunks_in(self, region: Region) -> Iterator[tuple[Chunk, Region]]:
        """Yields each box that intersects a region, with the intersection."""
        lead = self._lead
        for place in product(*(range(start, stop) for start, stop in region[:lead])):
            for chunk in self._by_lead.get(place, ()):
                both = intersect(region, chunk.region)
                if both is not None:
                    yield chunk, both

    def check_coverage(self) -> None:
        """Checks that the boxes cover the tensor exactly once.

        Raises:
            ValueError: A box lies outside the shape, boxes overlap, or elements are missing.
        """
        for chunk in self.chunks:
            if len(chunk.sizes) != len(self.shape) or intersect(chunk.region, full_region(self.shape)) != chunk.region:
                raise ValueError(f"box {list(chunk.region)} is not inside its shape {list(self.shape)}")
        regions = [chunk.region for chunk in self.chunks]
        twice = _find_overlap(regions, 0)
        if twice is not None:
            raise ValueError(f"contains {list(twice)} twice")
        lacking = volume(full_region(self.shape)) - sum(map(volume, regions))
        if lacking:
            raise ValueError(f"lacks {lacking} of the elements of its shape {list(self.shape)}")

    @cached_property
    def _lead(self) -> int:
        """Number of leading dimensions (layers, experts) in which every box has extent one."""
        lead = 0
        while lead < len(self.shape) and all(chunk.sizes[lead] == 1 for chunk in self.chunks):
            lead += 1
        return lead

    @cached_property
    def _by_lead(self) -> dict[tuple[int, ...], list[Chunk]]:
        found: dict[tuple[int, ...], list[Chunk]] = {}
        for chunk in self.chunks:
            found.setdefault(chunk.offsets[: self._lead], []).append(chunk)
        return found


@dataclass(frozen=True)
class Contents:
    """Content of a checkpoint: its tensors, and the keys of pickled objects."""

    tensors: dict[str, GlobalTensor]
    pickled: tuple[str, ...]


def read_contents(folder: Path) -> Contents:
    """Reads the metadata of a checkpoint.

    Raises:
        UserError: A file is missing, damaged or of another backend, or refers to code; the message names it.
    """
    _check_backend(folder / BACKEND_FILE)
    file = folder / METADATA
    metadata = read_metadata(file)
    tensors: dict[str, GlobalTensor] = {}
    pickled = []
    try:
        places: dict[tuple[str, tuple[int, ...]], _StorageInfo] = {}
        for index, info in metadata.storage_data.items():
            places[index.fqn, tuple(index.offset or ())] = info
        for key, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, dcp.TensorStorageMetadata):
                pickled.append(str(key))
                continue
            chunks = []
            for chunk in stored.chunks:
                offsets, sizes = _check_sizes(chunk.offsets), _check_sizes(chunk.sizes)
                info = places[key, offsets]
                start, num_bytes = _check_sizes((info.offset, info.length))
                chunks.append(Chunk(offsets, sizes, _check_file_name(info.relative_path), start, num_bytes))
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[str(key)] = GlobalTensor(_check_sizes(stored.size), dtype, tuple(chunks))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"'{file}' is not the metadata of a distributed checkpoint: {type(error).__name__}: {error}."
        ) from error
    return Contents(tensors, tuple(pickled))


class ChunkFiles:
    """The `.distcp` files of a checkpoint, mapped while they are read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: dict[str, Tensor] = {}
        self._blobs: dict[tuple[str, int], BlobTensor] = {}
        self._bytes_read = 0

    def __reduce__(self) -> tuple[type[ChunkFiles], tuple[Path]]:
        return ChunkFiles, (self._folder,)  # maps cannot be sent to another process

    def check(self, chunks: Iterable[Chunk]) -> None:
        """Compares the sizes of the files with the boxes' locations; reads nothing.

        Raises:
            UserError: A file is missing or too short, or two boxes overlap in it; the message names it.
        """
        spans: dict[str, list[tuple[int, int]]] = {}
        for chunk in chunks:
            spans.setdefault(chunk.file, []).append((chunk.start, chunk.start + chunk.num_bytes))
        for name, parts in sorted(spans.items()):
            parts.sort()
            self._check_size(name, max(stop for _, stop in parts))
            for (_, stop), (start, _) in pairwise(parts):
                if start < stop:
                    raise UserError(
                        f"'{self._folder / METADATA}' is invalid: two tensors share the bytes from {start} of '{name}'."
                    )

    def read(self, chunk: Chunk, region: Region, dtype: str) -> Tensor:
        """Reads a region, in coordinates of the global tensor, from a box; reads only its bytes.

        Raises:
            UserError: The file is missing or damaged, or differs from the metadata; the message names it.
        """
        blob = self._blob(chunk, dtype)
        own = tuple(slice(a - first, b - first) for (a, b), first in zip(region, chunk.offsets, strict=True))
        mapped = self._map(chunk.file)
        self._bytes_read += volume(region) * blob.dtype.itemsize
        if self._bytes_read > _MAPPED_BYTES:
            self.close()
        return blob.read(mapped, own)

    def close(self) -> None:
        """Releases the maps; tensors that were read keep their own references."""
        self._mapped.clear()
        self._bytes_read = 0

    def _check_size(self, name: str, end: int) -> int:
        path = self._folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise UserError(f"'{path}', listed in the checkpoint's metadata, cannot be read: {error}.") from error
        if size < end:
            raise UserError(f"'{path}' has {size} bytes; the checkpoint's metadata requires {end}. Copy it again.")
        return size

    def _map(self, name: str) -> Tensor:
        mapped = self._mapped.get(name)
        if mapped is None:
            size = self._check_size(name, 1)
            storage = torch.UntypedStorage.from_file(str(self._folder / name), shared=False, nbytes=size)
            mapped = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,))  # type: ignore[call-overload]
            self._mapped[name] = mapped
        return mapped

    def _blob(self, chunk: Chunk, dtype: str) -> BlobTensor:
        place = (chunk.file, chunk.start)
        path = self._folder / chunk.file
        if place not in self._blobs:
            self._check_size(chunk.file, chunk.start + chunk.num_bytes)
            try:
                with path.open("rb") as file:
                    self._blobs[place] = read_blob(file, chunk.start, chunk.num_bytes)
            except (InvalidBlobError, OSError) as error:
                raise UserError(f"'{path}' is damaged: invalid tensor at byte {chunk.start}: {error}.") from error
        blob = self._blobs[place]
        found = f"{list(blob.shape)} {str(blob.dtype).removeprefix('torch.')}"
        expected = f"{list(chunk.sizes)} {dtype}"
        if found != expected:
            raise UserError(
                f"'{path}' does not match its checkpoint's {METADATA}: the tensor at byte {chunk.start} is {found}, "
                f"expected {expected}."
            )
        return blob


class Writer(Protocol):
    """Interface of the output of `write_blobs`."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Appends bytes."""


def write_blobs(file: Writer, tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Writes tensors one after the other, with aligned elements.

    Args:
        file: Empty output.
        tensors: Contiguous CPU tensors; one is kept at a time.

    Returns:
        (offset, size in bytes) of each blob.
    """
    places = []
    position = 0
    for tensor in tensors:
        gap = -position % ALIGNMENT
        if gap:
            file.write(bytes(gap))
        start = position = position + gap
        for part in blob_parts(tensor):
            file.write(part)
            position += len(part)
        places.append((start, position - start))
    return places


def write_contents(
    folder: Path, tensors: Mapping[str, GlobalTensor], *, empty: Iterable[str], common: Mapping[str, Any]
) -> None:
    """Writes the metadata that makes a folder of `.distcp` files a checkpoint.

    Args:
        folder: Folder with the files that the chunks refer to.
        tensors: Key -> tensor.
        empty: Keys of pickled objects that are None.
        common: Content of `common.pt`, plain values.
    """
    state: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for key, tensor in tensors.items():
        chunks = []
        for chunk in tensor.chunks:
            offsets = torch.Size(chunk.offsets)
            chunks.append(dcp.ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(chunk.sizes)))
            storage[dcp.MetadataIndex(key, offsets)] = _StorageInfo(chunk.file, chunk.start, chunk.num_bytes)
        properties = dcp.TensorProperties(dtype=DTYPES[tensor.dtype])
        state[key] = dcp.TensorStorageMetadata(properties=properties, size=torch.Size(tensor.shape), chunks=chunks)
    keys = list(empty)
    if keys:
        none = io.BytesIO()
        torch.save([None], none)  # one object, as each rank would pickle it; all keys refer to it
        write_file(folder / _EMPTY_FILE, none.getvalue())
        for key in keys:
            state[key] = dcp.BytesStorageMetadata()
            storage[dcp.MetadataIndex(key)] = _StorageInfo(_EMPTY_FILE, 0, len(none.getvalue()))
    shared = io.BytesIO()
    torch.save(dict(common), shared)
    write_file(folder / COMMON, shared.getvalue())
    metadata = dcp.Metadata(state_dict_metadata=state, storage_data=storage, storage_meta=dcp.StorageMeta())
    write_file(folder / METADATA, pickle.dumps(metadata))
    write_file(folder / BACKEND_FILE, json.dumps(_BACKEND).encode())  # last: it marks the folder as complete


def _check_backend(file: Path) -> None:
    try:
        backend = json.loads(file.read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"'{file.parent}' is not a complete distributed checkpoint: {file.name} cannot be read "
            f"({type(error).__name__}: {error})."
        ) from error
    if backend != _BACKEND["sharded_backend"]:
        raise UserError(
            f"'{file.parent}' is a checkpoint of the '{backend}' backend; mrl reads 'torch_dist'. Load it with "
            "Megatron and save it with --ckpt-format torch_dist."
        )


def _check_sizes(values: Iterable[Any]) -> tuple[int, ...]:
    found = tuple(values)
    if not all(type(value) is int and value >= 0 for value in found):
        raise ValueError(f"{list(found)} are not sizes")
    return found


def _check_file_name(name: Any) -> str:
    """Checks that a name is a file of the same folder: metadata must not make mrl read any other."""
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"{name!r} is not a file of the checkpoint's folder")
    return name


def _find_overlap(regions: list[Region], axis: int) -> Region | None:
    """Returns the intersection of two overlapping regions, None if all are disjoint.

    Regions are grouped by disjoint intervals along an axis, the groups again along the next axis. Megatron's are then
    alone in their groups, so no pairs need to be compared.
    """
    if len(regions) < 2:
        return None
    if axis == len(regions[0]):
        shared = (intersect(a, b) for a, b in combinations(regions, 2))
        return next((both for both in shared if both is not None), None)
    groups: list[list[Region]] = []
    end = -1
    for region in sorted(regions, key=lambda region: region[axis]):
        start, stop = region[axis]
        if start >= end:
            groups.append([])
        groups[-1].append(region)
        end = max(end, stop)
    found = (_find_overlap(group, axis + 1) for group in groups)
    return next((both for both in found if both is not None), None)
