"""A file that is hashed while it is written sequentially, so that it is not read again for its hash.

The hash is XXH3 (64 bits): it detects damage and mix-ups, not forgery. Written data is copied into blocks. Threads hash
and write the blocks concurrently with the caller, bypassing the page cache where the file system supports `O_DIRECT`:
the CPU then moves each byte once, and little is left to fsync at the end.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash

from mrl.errors import UserError

BLOCK_BYTES = 4 << 20
"""Block size: large enough for the full speed of a disk, small enough to be in the CPU cache when hashed."""

_NUM_BLOCKS = 4
"""One block to fill, two being written, one being hashed."""

_NUM_WRITERS = 2
"""Writer threads; two, so that the disk always has a request queued."""

_READ_BYTES = 1 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)


class _Block:
    """Page-aligned memory, as direct writes require."""

    def __init__(self) -> None:
        self.memory = memoryview(mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self.array = np.frombuffer(self.memory, np.uint8)
        self.size = 0
        self.works: list[Future[Any]] = []


class OutputFile:
    """A new file open for writing; as a context manager it fsyncs on success.

    Attributes:
        num_bytes: Bytes written so far.
    """

    def __init__(self, path: str | Path) -> None:
        """Opens the file; truncates an existing one.

        Raises:
            UserError: The file cannot be opened.
        """
        self._path = Path(path)
        self._hash = xxhash.xxh3_64()
        self._hasher: ThreadPoolExecutor | None = None
        self._writers: ThreadPoolExecutor | None = None
        self._blocks = [_Block()]
        self._sent = 0
        self._direct = False
        self.num_bytes = 0
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._error(error) from error

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for block in self._blocks[1:]:
                    self._wait(block)
                self._set_direct(False)
                last = self._blocks[0]
                self._hash.update(last.memory[: last.size])
                self._write(last.memory[: last.size], self._sent)
                os.fsync(self._file)
        except OSError as failure:
            raise self._error(failure) from failure
        finally:
            for threads in (self._hasher, self._writers):
                if threads is not None:
                    threads.shutdown()
            os.close(self._file)
            self._blocks.clear()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Appends bytes; the caller may reuse the buffer when this returns.

        Raises:
            UserError: No space is left, or the disk refuses; the message names the file. Writes are asynchronous: a
                later call or the end of the `with` block may raise it.
        """
        view = memoryview(data)
        if not view.nbytes:
            return 0
        array = np.frombuffer(view.cast("B"), np.uint8)
        done = 0
        while done < view.nbytes:
            block = self._blocks[0]
            count = min(BLOCK_BYTES - block.size, view.nbytes - done)
            np.copyto(block.array[block.size : block.size + count], array[done : done + count])
            block.size += count
            done += count
            if block.size == BLOCK_BYTES:
                self._submit(block)
        self.num_bytes += view.nbytes
        return view.nbytes

    @property
    def xxh3(self) -> str:
        """Hash of the file, 16 hexadecimal digits; valid after the `with` block."""
        return str(self._hash.hexdigest())

    def _submit(self, block: _Block) -> None:
        """Submits a full block for hashing and writing, and makes a free block current."""
        if self._hasher is None or self._writers is None:
            self._hasher, self._writers = ThreadPoolExecutor(1), ThreadPoolExecutor(_NUM_WRITERS)
            self._set_direct(True)
        block.works = [
            self._hasher.submit(self._hash.update, block.memory),
            self._writers.submit(self._write, block.memory, self._sent),
        ]
        self._sent += BLOCK_BYTES
        self._blocks.append(self._blocks.pop(0))
        if len(self._blocks) < _NUM_BLOCKS:
            self._blocks.insert(0, _Block())
        try:
            self._wait(self._blocks[0])
        except OSError as error:
            raise self._error(error) from error

    def _wait(self, block: _Block) -> None:
        """Waits until a block is free."""
        works, block.works = block.works, []
        for work in works:
            work.result()
        block.size = 0

    def _write(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < data.nbytes:
            direct = self._direct
            try:
                done += os.pwrite(self._file, data[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._set_direct(False)  # the file system requires other alignment, or wrote only a part before

    def _set_direct(self, direct: bool) -> None:
        """Enables or disables writes that bypass the page cache; not every file system supports them."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~_DIRECT
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | _DIRECT if direct else flags)
        except OSError:  # not supported by the file system
            direct = False
        self._direct = direct

    def _error(self, error: OSError) -> UserError:
        return UserError(f"'{self._path}' cannot be written: {error.strerror or error}.")


def xxh3_file(path: str | Path) -> str:
    """Returns the hash of an existing file, equal to `OutputFile.xxh3`; reads the file once.

    Raises:
        UserError: The file cannot be read.
    """
    found = xxhash.xxh3_64()
    try:
        with Path(path).open("rb", buffering=0) as file:
            buffer = memoryview(mmap.mmap(-1, _READ_BYTES))  # page-aligned: copies to it are fastest
            while count := file.readinto(buffer):
                found.update(buffer[:count])
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    return str(found.hexdigest())
