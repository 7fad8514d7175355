"""One safetensors file: written tensor by tensor, read by name after its header has been validated.

The format (https://huggingface.co/docs/safetensors) is 8 bytes with the length of the header, the header as JSON, then
the tensors without gaps. The writer needs memory for one tensor; the `safetensors` package needs all of them. The
reader validates the complete header against the file before it reads any tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from mrl.checkpoint.io.hashed_writer import OutputFile
from mrl.errors import UserError

_TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's name of a dtype -> torch dtype."""

_CODES = {str(dtype).removeprefix("torch."): code for code, dtype in _TORCH.items()}

_LENGTH_BYTES = 8
_ALIGNMENT = 64
"""Alignment of the data in the file, and so in memory, bytes. Copies to an address slightly after the source modulo the
page size are slow (on AMD a quarter of the speed).
"""
_LONGEST_REASON = 500
"""Longest error message, characters; a header could fill it with its own names."""
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


@dataclass(frozen=True)
class Header:
    """Entry of one tensor in a file's header.

    Attributes:
        shape: Shape of the tensor.
        dtype: Dtype name without "torch.", as in `resharding/dtypes.py: DTYPES`.
        start: Offset of the first byte in the file.
        stop: Offset after the last byte.
    """

    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int


def write_safetensors(
    path: str | Path,
    layout_like: Mapping[str, tuple[tuple[int, ...], str]],
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Writes a file sequentially; each tensor may be freed once the next one is requested.

    The bytes are hashed while they are written, and fsynced; the caller renames the finished file.

    Args:
        path: File to write; an existing one is overwritten.
        layout_like: Name -> (shape, dtype name), in the order of the file. A wider dtype must not follow a narrower one
            whose bytes end off its alignment: put wider dtypes first.
        tensors: (name, tensor) in that order, with those shapes and dtypes.
        metadata: Text entries of the header; Hugging Face files have {"format": "pt"}.

    Returns:
        {"num_bytes": size of the file, "xxh3": its hash}, from `OutputFile`.

    Raises:
        UserError: The file cannot be written (no space, no permission); the message names it.
        RuntimeError: `tensors` differ from `layout_like`, or a tensor would be misaligned.
    """
    with OutputFile(path) as file:
        file.write(_header(layout_like, metadata or {}))
        expected = iter(layout_like.items())
        for name, tensor in tensors:
            _write_tensor(file, name, tensor, next(expected, None))
        left = next(expected, None)
        if left is not None:
            raise RuntimeError(f"'{path}': the tensors end before '{left[0]}'")
    return {"num_bytes": file.num_bytes, "xxh3": file.xxh3}


def _header(layout_like: Mapping[str, tuple[tuple[int, ...], str]], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (shape, dtype) in layout_like.items():
        item_bytes = _TORCH[_CODES[dtype]].itemsize
        if end % item_bytes:
            raise RuntimeError(f"'{name}' ({dtype}) would start at byte {end}; wider dtypes must come first")
        start, end = end, end + math.prod(shape) * item_bytes
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _write_tensor(
    file: OutputFile, name: str, tensor: Tensor, announced: tuple[str, tuple[tuple[int, ...], str]] | None
) -> None:
    found = (name, (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
    if announced is None or found != (announced[0], (tuple(announced[1][0]), announced[1][1])):
        raise RuntimeError(f"expected {announced} as the file's next tensor, got {found}")
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    file.write(data.numpy().data)


class SafetensorsFile:
    """A file whose header has been validated.

    Attributes:
        path: Path of the file.
        headers: Name -> Header, in the order of their bytes.
        metadata: Text entries of the header.
        num_bytes: Size of the file.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads and validates the header.

        Raises:
            UserError: The file cannot be read, is truncated, or its header contradicts itself; the message names the
                file.
        """
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self.num_bytes = file.seek(0, 2)
                file.seek(0)
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                first = _LENGTH_BYTES + length
                if self.num_bytes < _LENGTH_BYTES or first > self.num_bytes or length > _MAX_HEADER_BYTES:
                    self._fail(f"it has {self.num_bytes} bytes and announces a header of {length}")
                text = file.read(length)
        except OSError as error:
            raise UserError(f"'{path}' cannot be read: {error.strerror or error}.") from error
        try:
            entries = json.loads(text, object_pairs_hook=self._without_duplicates)
        except (ValueError, RecursionError) as error:
            if isinstance(error, UserError):
                raise
            self._fail(f"its header is not JSON: {error}")
        if not isinstance(entries, dict):
            self._fail("its header is not a JSON object")
        self.metadata: dict[str, str] = entries.pop("__metadata__", None) or {}
        if not isinstance(self.metadata, dict):
            self._fail("its __metadata__ is not a JSON object")
        found = {name: self._parse_entry(name, entry, first) for name, entry in entries.items()}
        self.headers: dict[str, Header] = dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)))
        end = first
        for name, header in self.headers.items():
            if header.start != end:
                self._fail(f"'{name}' starts at byte {header.start}, but the tensor before it ends at {end}")
            end = header.stop
        if end != self.num_bytes:
            self._fail(f"its tensors end at byte {end}, but it has {self.num_bytes} bytes")

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Renames the tensors of this object; one whose new name is taken keeps its own.

        Args:
            new_name: Name in the file -> new name.
        """
        taken = set(self.headers)
        self.headers = {
            name if (other := new_name(name)) in taken else other: header for name, header in self.headers.items()
        }

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor as a view of a private memory mapping (mmap) of the file; only accessed pages are read.

        The mapping lives as long as its views. A misaligned tensor is copied.

        Raises:
            UserError: The file is gone, or its size has changed since its header was validated.
            KeyError: There is no such tensor.
        """
        header = self.headers[name]
        try:
            if self.path.stat().st_size != self.num_bytes:
                self._fail(f"it had {self.num_bytes} bytes when it was opened and has {self.path.stat().st_size} now")
            data = torch.from_file(str(self.path), shared=False, size=self.num_bytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise UserError(f"'{self.path}' cannot be read: {error}.") from error
        data = data[header.start : header.stop]
        dtype = _TORCH[_CODES[header.dtype]]
        if header.start % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(header.shape)

    def _parse_entry(self, name: str, entry: Any, first: int) -> Header:
        try:
            code, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            self._fail(f"'{name}' lacks a dtype, a shape or two data_offsets")
        if not isinstance(code, str) or code not in _TORCH:
            self._fail(f"'{name}' has the dtype {code!r}; known are {', '.join(_TORCH)}")
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            self._fail(f"'{name}' has the shape {list(shape)} and the data_offsets {[start, stop]}")
        if stop - start != math.prod(shape) * _TORCH[code].itemsize:
            self._fail(f"'{name}' of shape {list(shape)} as {code} cannot have {stop - start} bytes")
        return Header(shape, str(_TORCH[code]).removeprefix("torch."), first + start, first + stop)

    def _without_duplicates(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            self._fail(f"its header names '{next(name for name in names if names.count(name) > 1)}' twice")
        return found

    def _fail(self, reason: str) -> NoReturn:
        raise UserError(
            f"'{self.path}' is not a complete safetensors file: {reason[:_LONGEST_REASON]}. Download, convert or "
            "export it again."
        )
