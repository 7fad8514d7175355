"""One tensor in `torch.save` format inside a file: read without unpickling objects, written without a copy.

The format is a zip archive, stored without compression, of `data.pkl` (shape and strides of the tensor in its storage),
`byteorder`, `data/0` (the storage) and `version`. Reading needs the archive's directory and the small pickle, whose
unpickler accepts a tensor's description only; the storage stays in the mapped file. Sources, torch 2.13:
`torch/serialization.py: _save` and `torch/_utils.py: _rebuild_tensor_v2`.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from isal import isal_zlib
from torch import Tensor

ALIGNMENT = 64
"""Alignment of a storage, counted from the start of its archive, bytes; the same as torch's."""

_STORAGES = {
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "DoubleStorage": torch.float64,
}
_STORAGE_OF = {dtype: name for name, dtype in _STORAGES.items()}
_MAX_PICKLE_BYTES = 1 << 16
_LIMIT = _IN_ZIP64 = 0xFFFFFFFF
"""Sizes from this limit on are stored in a zip64 field, and this value in the normal field."""


class InvalidBlobError(Exception):
    """The bytes are not a tensor written by `torch.save`; the message says why."""


@dataclass(frozen=True)
class BlobTensor:
    """Tensor in a `torch.save` blob of a file.

    Attributes:
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        strides: Strides of the tensor, elements.
        start: Offset of its first byte in the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    def read(self, mapped: Tensor, index: tuple[slice, ...]) -> Tensor:
        """Returns a part of the tensor.

        Args:
            mapped: The entire file as uint8.
            index: Index of the part.

        Returns:
            A view of the file if the tensor is aligned in memory, else a copy of the part.
        """
        width = self.dtype.itemsize
        span = 1 + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        own = mapped[self.start : self.start + span * width]
        if self.start % width == 0:
            return own.view(self.dtype).as_strided(self.shape, self.strides)[index]
        # as bytes, because computing with unaligned elements is not allowed
        strides = (*(stride * width for stride in self.strides), 1)
        part = own.as_strided((*self.shape, width), strides, own.storage_offset())[index]
        return part.clone(memory_format=torch.contiguous_format).view(self.dtype).squeeze(-1)


def read_blob(file: BinaryIO, offset: int, length: int) -> BlobTensor:
    """Locates the tensor in the blob of `length` bytes at `offset`.

    Raises:
        InvalidBlobError: The bytes are not a tensor, or incomplete.
    """
    try:
        with zipfile.ZipFile(_FileWindow(file, offset, length)) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if entries["data.pkl"].file_size > _MAX_PICKLE_BYTES:
                raise InvalidBlobError("its description is too long for one tensor's")
            described = _TensorUnpickler(io.BytesIO(archive.read(entries["data.pkl"]))).load()
            order = entries.get("byteorder")
            if order is not None and (order.file_size > 6 or archive.read(order) != b"little"):
                raise InvalidBlobError("its bytes are in big-endian order")
        if not isinstance(described, _TensorDescription):
            raise InvalidBlobError(f"it contains a {type(described).__name__}, not a tensor")
        entry = entries[f"data/{described.storage.key}"]
        start = offset + _data_start(file, offset, entry)
    except InvalidBlobError:
        raise
    except Exception as error:  # a broken archive or pickle raises anything
        raise InvalidBlobError(f"it cannot be read as a tensor ({type(error).__name__}: {error})") from error
    described.check(entry, offset + length - start)
    first = described.first * described.storage.dtype.itemsize
    return BlobTensor(described.storage.dtype, described.shape, described.strides, start + first)


def blob_parts(tensor: Tensor) -> Iterator[bytes | memoryview]:
    """Yields the bytes of `torch.save(tensor)` in parts; the tensor's own bytes are not copied.

    Args:
        tensor: Contiguous CPU tensor.

    Raises:
        ValueError: torch has no storage class for its dtype.
    """
    if tensor.dtype not in _STORAGE_OF:
        raise ValueError(f"torch.save's format for {tensor.dtype} is not supported")
    data: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    entries = (
        ("data.pkl", memoryview(_pickled(tensor))),
        ("byteorder", memoryview(b"little")),
        ("data/0", data),
        ("version", memoryview(b"3\n")),
    )
    position = 0
    directory = b""
    for entry, content in entries:
        name = f"archive/{entry}".encode()
        local, central = _headers(name, content, position)
        yield local
        yield content
        position += len(local) + content.nbytes
        directory += central
    yield directory + _archive_end(len(entries), position, len(directory))


def _pickled(tensor: Tensor) -> bytes:
    out = io.BytesIO()
    _TensorPickler(out, tensor).dump(_Marker())
    return out.getvalue()


class _Marker:
    """Placeholder for the tensor while it is pickled."""


class _StorageMarker:
    pass


class _TensorPickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, tensor: Tensor) -> None:
        super().__init__(out, protocol=2)
        self._tensor = tensor

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Marker):
            return NotImplemented
        shape, strides = tuple(self._tensor.shape), tuple(self._tensor.stride())
        return torch._utils._rebuild_tensor_v2, (_StorageMarker(), 0, shape, strides, False, OrderedDict())

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _StorageMarker):
            return None
        return ("storage", getattr(torch, _STORAGE_OF[self._tensor.dtype]), "0", "cpu", self._tensor.numel())


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    key: str
    numel: int


@dataclass(frozen=True)
class _TensorDescription:
    storage: _Storage
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def check(self, entry: zipfile.ZipInfo, room: int) -> None:
        """Raises InvalidBlobError if the tensor exceeds its storage, or the storage exceeds the blob."""
        numbers = (self.first, *self.shape, *self.strides, self.storage.numel)
        if len(self.shape) != len(self.strides) or not all(type(number) is int and number >= 0 for number in numbers):
            raise InvalidBlobError("its description is not one of a tensor")
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        if 0 in self.shape or self.first + last >= self.storage.numel:
            raise InvalidBlobError(f"a tensor of {list(self.shape)} does not fit into {self.storage.numel} elements")
        num_bytes = self.storage.numel * self.storage.dtype.itemsize
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != num_bytes or num_bytes > room:
            raise InvalidBlobError(f"its storage is not {num_bytes} uncompressed bytes")


class _TensorUnpickler(pickle.Unpickler):
    """Unpickler of a tensor's description; accepts no other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _describe
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return name
        raise InvalidBlobError(f"it refers to '{module}.{name}', which is not data")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage, key, _, numel = pid
        if kind != "storage" or storage not in _STORAGES or not isinstance(key, str):
            raise InvalidBlobError("its description names no storage")
        return _Storage(_STORAGES[storage], key, numel)


def _describe(storage: _Storage, first: int, shape: Any, strides: Any, *rest: Any) -> _TensorDescription:
    if not isinstance(storage, _Storage):
        raise InvalidBlobError("its description names no storage")
    return _TensorDescription(storage, first, tuple(shape), tuple(strides))


def _data_start(file: BinaryIO, offset: int, entry: zipfile.ZipInfo) -> int:
    """Returns the offset of an entry's content from the start of the archive."""
    file.seek(offset + entry.header_offset)
    *_, name_length, extra_length = struct.unpack("<4s5H3I2H", file.read(30))
    return int(entry.header_offset + 30 + name_length + extra_length)


class _FileWindow(io.RawIOBase):
    """A part of a file, presented as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise OSError("the position is before the start of the file")
        self._position = origin + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._position)
        count = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._offset + self._position)
        data = self._file.read(count)
        self._position += len(data)
        return data


def _headers(name: bytes, content: memoryview, position: int) -> tuple[bytes, bytes]:
    """Returns an entry's local header and its directory header; `position` is the offset of the former."""
    size, crc = content.nbytes, isal_zlib.crc32(content)
    wide = struct.pack("<2H2Q", 1, 16, size, size) if size >= _LIMIT else b""
    shown = _IN_ZIP64 if wide else size
    # as in torch, an unused extra field aligns the content
    gap = -(position + 30 + len(name) + len(wide) + 4) % ALIGNMENT
    extra = wide + struct.pack("<2sH", b"FB", gap) + b"Z" * gap
    version, date = 45 if wide else 20, 0x21  # 1980-01-01: makes the bytes reproducible
    fields = struct.pack("<5H3I", version, 0, 0, 0, date, crc, shown, shown)
    local = b"PK\x03\x04" + fields + struct.pack("<2H", len(name), len(extra)) + name + extra
    far = position >= _LIMIT
    large = struct.pack("<2Q", size, size) if wide else b""
    large += struct.pack("<Q", position) if far else b""
    extra = struct.pack("<2H", 1, len(large)) + large if large else b""
    central = b"PK\x01\x02" + struct.pack("<H", version) + fields
    central += struct.pack("<5H2I", len(name), len(extra), 0, 0, 0, 0, _IN_ZIP64 if far else position) + name + extra
    return local, central


def _archive_end(count: int, start: int, length: int) -> bytes:
    """Returns the end of an archive whose directory takes `length` bytes from `start`."""
    wide = b""
    if start >= _LIMIT:
        wide = b"PK\x06\x06" + struct.pack("<Q2H2I4Q", 44, 45, 45, 0, 0, count, count, length, start)
        wide += b"PK\x06\x07" + struct.pack("<IQI", 0, start + length, 1)
    shown = _IN_ZIP64 if wide else start
    return wide + b"PK\x05\x06" + struct.pack("<4H2IH", 0, 0, count, count, length, shown, 0)
