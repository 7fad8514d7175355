"""A file that is written from front to back and hashed on the way, so that it is never read again for its hash.

Owns the hash of a checkpoint's file (XXH3, 64 bits: a guard against damage and mix-ups, not against forgery), of one
that is being written and of one that is there.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import xxhash

from mrl.errors import UserError

_READ_BYTES = 16 << 20
_THREAD_BYTES = 1 << 20
"""Below this, handing the hash to a thread costs more than the hash."""


class OutputFile:
    """A new file, open for writing; use it in a `with` block, which forces the bytes to the disk on success.

    Attributes:
        num_bytes: Written so far.
    """

    def __init__(self, path: str | Path) -> None:
        """Opens the file; an existing one is emptied.

        Raises:
            UserError: It cannot be opened.
        """
        self._path = Path(path)
        self._hash = xxhash.xxh3_64()
        self._hasher = ThreadPoolExecutor(1)
        self.num_bytes = 0
        try:
            self._file = self._path.open("wb", buffering=0)
        except OSError as error:
            raise self._failure(error) from error

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hasher.shutdown()
        try:
            if kind is None:
                os.fsync(self._file.fileno())
        except OSError as failure:
            raise self._failure(failure) from failure
        finally:
            self._file.close()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Appends bytes; hashes them at the same time, in a thread. The buffer is free when this returns.

        Raises:
            UserError: No space is left, or the disk refuses; the file is named.
        """
        view = memoryview(data)
        if not view.nbytes:
            return 0
        view = view.cast("B")
        if view.nbytes < _THREAD_BYTES:
            self._hash.update(view)
            hashed = None
        else:
            hashed = self._hasher.submit(self._hash.update, view)
        try:
            done = 0
            while done < view.nbytes:
                done += self._file.write(view[done:])
        except OSError as error:
            raise self._failure(error) from error
        finally:
            if hashed is not None:
                hashed.result()
        self.num_bytes += view.nbytes
        return view.nbytes

    @property
    def xxh3(self) -> str:
        """The hash of what was written so far, 16 hexadecimal digits."""
        return str(self._hash.hexdigest())

    def _failure(self, error: OSError) -> UserError:
        return UserError(f"'{self._path}' cannot be written: {error.strerror or error}.")


def hash_file(path: str | Path) -> str:
    """The hash of a file that is there, as `OutputFile.xxh3`; it is read once.

    Raises:
        UserError: It cannot be read.
    """
    found = xxhash.xxh3_64()
    try:
        with Path(path).open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(min(_READ_BYTES, os.fstat(file.fileno()).st_size + 1)))
            while count := file.readinto(buffer):
                found.update(buffer[:count])
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    return str(found.hexdigest())
