"""Data rows by index from JSONL files, parquet files, synthetic tasks, or several of them concatenated.

Data stay on disk: a JSONL file keeps the offset of each line in memory, a parquet file a cache of recently used row
groups. Opening a JSONL file parses every line; opening a parquet file checks one row of each kind
(`parquet_values.py`). Bad rows are therefore found before a run starts.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mrl.config.did_you_mean import did_you_mean_path
from mrl.config.user_code import label
from mrl.data.parquet_values import columns_with_gaps, float_reader, kinds_of_gaps
from mrl.data.public_sets.base import AmbiguousRowError, Row, UnusableRowError, find, recognize
from mrl.data.shuffle import Shuffle
from mrl.data.synthetic_tasks import Task
from mrl.errors import UserError, first_line

PARQUET_CACHE_BYTES = 1 << 30
"""Size of the cache of decoded row groups per file. The last used row group is always kept, so a smaller file is
decoded once.
"""

Check = Callable[[Row, str], None]
"""Function of a row and its source that raises UserError where the row cannot be used."""


class RowSource(ABC):
    """Immutable list of data rows.

    Attributes:
        fingerprint: Hash of the content; equal for equal rows in equal order, regardless of the files' location.
    """

    fingerprint: str

    @property
    def conversions(self) -> tuple[str, ...]:
        """Names of the public data sets whose raw rows are converted; empty for most sources."""
        return ()

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of rows."""

    @abstractmethod
    def row(self, index: int) -> Row:
        """Returns the values of a row by column name."""

    @abstractmethod
    def source(self, index: int) -> str:
        """Returns the origin of a row for messages, such as "train.jsonl:17"."""

    @abstractmethod
    def data_source(self, index: int) -> str:
        """Returns the default data set name of a row: the file name without its suffix, or the task's name."""


class JsonlRows(RowSource):
    """Rows of a file with one JSON object per line; blank lines are skipped."""

    def __init__(self, path: str, check: Check) -> None:
        """Reads the file once and checks every row.

        Raises:
            UserError: The file is missing, a line is not a JSON object, or `check` rejects it.
        """
        self._path = path
        self._offsets = array("q")
        self._lines = array("q")
        content = blake2b(digest_size=16)
        offset = 0
        with _open(path) as file:
            _check_text(file, path)
            for number, line in enumerate(file, start=1):
                content.update(line)
                if line.strip():
                    source = f"{path}:{number}"
                    check(_parse(line, source), source)
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)
        self._file = _open(path)
        self.fingerprint = content.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, index: int) -> Row:
        """Parses the line of a row."""
        self._file.seek(self._offsets[index])
        return _parse(self._file.readline(), self.source(index))

    def source(self, index: int) -> str:
        """Returns "path:line", counted from 1."""
        return f"{self._path}:{self._lines[index]}"

    def data_source(self, index: int) -> str:
        """Returns the file name without its suffix."""
        return Path(self._path).stem


class ParquetRows(RowSource):
    """Rows of a parquet file; nested columns become dicts and lists."""

    def __init__(self, path: str, check: Check, cache_bytes: int = PARQUET_CACHE_BYTES) -> None:
        """Hashes the file, and checks the first row and one row of each combination of missing values.

        Raises:
            UserError: The file is missing or not parquet, or `check` rejects a row.
        """
        import pyarrow
        import pyarrow.parquet

        content = blake2b(digest_size=16)
        with _open(path) as file:
            while block := file.read(1 << 22):
                content.update(block)
        self.fingerprint = content.hexdigest()
        self._path = path
        self._refusals = (pyarrow.ArrowException, OSError, ValueError, TypeError, ArithmeticError, LookupError)
        try:
            self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        except self._refusals as error:
            raise UserError(
                f"data: '{path}' is not a readable parquet file: {_reason(error)}. It may be truncated or in another "
                "format; copy or download it again."
            ) from error
        metadata = self._file.metadata
        self._starts = [0]
        for group in range(metadata.num_row_groups):
            self._starts.append(self._starts[-1] + metadata.row_group(group).num_rows)
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._cache_bytes = cache_bytes
        readers = {column.name: float_reader(column.type) for column in self._file.schema_arrow}
        self._float_readers = {name: reader for name, reader in readers.items() if reader is not None}
        if len(self):
            check(self.row(0), self.source(0))
        for index in self._distinct_gap_rows():
            check(self.row(index), self.source(index))

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> Row:
        """Returns a row, from the cached row group if possible."""
        group = bisect_right(self._starts, index) - 1
        try:
            table = self._cache.pop(group, None)
            if table is None:
                table = self._file.read_row_group(group)
            self._cache[group] = table
            while len(self._cache) > 1 and sum(kept.nbytes for kept in self._cache.values()) > self._cache_bytes:
                self._cache.popitem(last=False)
            (row,) = table.slice(index - self._starts[group], 1).to_pylist()
        except self._refusals as error:
            raise UserError(
                f"{self.source(index)}: the row cannot be read: {_reason(error)}. The file is damaged; copy or "
                "download it again."
            ) from error
        return {**row, **{name: reader(row[name]) for name, reader in self._float_readers.items()}}

    def _distinct_gap_rows(self) -> Iterator[int]:
        """Yields the index of the first row of each combination of missing values."""
        seen: set[tuple[str, ...]] = set()
        for group, start in enumerate(self._starts[:-1]):
            names = columns_with_gaps(self._file, group)
            if not names:
                continue
            try:
                kinds = list(kinds_of_gaps(self._file.read_row_group(group, columns=names)))
            except self._refusals as error:
                raise UserError(
                    f"data: '{self._path}': rows {start} to {self._starts[group + 1] - 1} cannot be read: "
                    f"{_reason(error)}. The file is damaged; copy or download it again."
                ) from error
            for row, kind in sorted(kinds):
                if (key := (*names, kind.hex())) not in seen:
                    seen.add(key)
                    yield start + row

    def source(self, index: int) -> str:
        """Returns "path:row", counted from 0 as in pandas and pyarrow."""
        return f"{self._path}:{index}"

    def data_source(self, index: int) -> str:
        """Returns the file name without its suffix."""
        return Path(self._path).stem


class TaskRows(RowSource):
    """Training or held-out rows of a synthetic task."""

    def __init__(self, task: Task, name: str, kwargs: Mapping[str, Any], side: str) -> None:
        """Selects the rows and computes their fingerprint.

        Args:
            task: Generator of the rows.
            name: Name or path of the task in the config.
            kwargs: Arguments of the task.
            side: "train" or "val".
        """
        self._size = task.num_train if side == "train" else task.num_val
        self._make = task.train_row if side == "train" else task.val_row
        self._name, self._side = label(name), side
        described = json.dumps([self._name, side, dict(kwargs)], sort_keys=True, default=str)
        self.fingerprint = blake2b(described.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> Row:
        """Generates a row."""
        return self._make(index)

    def source(self, index: int) -> str:
        """Returns "task side:index"."""
        return f"{self._name} {self._side}:{index}"

    def data_source(self, index: int) -> str:
        """Returns the task's name; of a path its last component."""
        return self._name.replace(":", ".").rpartition(".")[2]


class ChainedRows(RowSource):
    """Concatenation of several row sources."""

    def __init__(self, parts: Sequence[RowSource]) -> None:
        """Concatenates the sources in the given order."""
        self._parts = list(parts)
        self._starts = [0]
        for part in parts:
            self._starts.append(self._starts[-1] + len(part))
        self.fingerprint = "+".join(part.fingerprint for part in parts)

    @property
    def conversions(self) -> tuple[str, ...]:
        """The names of all parts, each once."""
        return tuple(dict.fromkeys(name for part in self._parts for name in part.conversions))

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def sizes(self) -> list[int]:
        """Number of rows of each part."""
        return [len(part) for part in self._parts]

    def _find(self, index: int) -> tuple[RowSource, int]:
        part = bisect_right(self._starts, index) - 1
        return self._parts[part], index - self._starts[part]

    def row(self, index: int) -> Row:
        """Returns a row of the source that contains the index."""
        part, inner = self._find(index)
        return part.row(inner)

    def source(self, index: int) -> str:
        """Returns the row's origin as its own source reports it."""
        part, inner = self._find(index)
        return part.source(inner)

    def data_source(self, index: int) -> str:
        """Returns the data set name as the row's own source reports it."""
        part, inner = self._find(index)
        return part.data_source(inner)


class ChosenRows(RowSource):
    """Some rows of another source, in its order."""

    def __init__(self, rows: RowSource, count: int, *, shuffle: bool) -> None:
        """Chooses the rows.

        Args:
            rows: Source of the rows.
            count: Number of rows to choose, below the number of rows.
            shuffle: True for a random choice that depends on the numbers alone; False for the first rows.
        """
        permutation = Shuffle(len(rows), 0) if shuffle else range(count).__getitem__
        self._rows = rows
        self._indices = array("q", sorted(permutation(index) for index in range(count)))
        self.fingerprint = f"{rows.fingerprint}[{count}{' random' if shuffle else ''}]"

    @property
    def conversions(self) -> tuple[str, ...]:
        """The names that the source reports."""
        return self._rows.conversions

    def __len__(self) -> int:
        return len(self._indices)

    def row(self, index: int) -> Row:
        """Returns a chosen row."""
        return self._rows.row(self._indices[index])

    def source(self, index: int) -> str:
        """Returns the row's origin as its own source reports it."""
        return self._rows.source(self._indices[index])

    def data_source(self, index: int) -> str:
        """Returns the data set name as the row's own source reports it."""
        return self._rows.data_source(self._indices[index])


class ConvertedRows(RowSource):
    """Rows of a file with the raw rows of public data sets converted to prompts (`public_sets/`).

    Attributes:
        name: Name of the data set that the first row belongs to; None if that row needs no conversion.
    """

    def __init__(self, rows: RowSource) -> None:
        """Wraps a source with at least one row."""
        self._rows = rows
        self.name = _data_set_of(rows.row(0), rows.source(0))
        self.fingerprint = rows.fingerprint if self.name is None else f"{rows.fingerprint}:{self.name}"

    @property
    def conversions(self) -> tuple[str, ...]:
        """The name of the data set, if any."""
        return () if self.name is None else (self.name,)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        """Returns a row after conversion."""
        return convert_row(self._rows.row(index), self.source(index))

    def source(self, index: int) -> str:
        """Returns the row's origin as its file reports it."""
        return self._rows.source(index)

    def data_source(self, index: int) -> str:
        """Returns the data set name as the file reports it."""
        return self._rows.data_source(index)


def convert_row(row: Row, source: str) -> Row:
    """Returns prompt, answer and other columns of a raw row of a public data set; other rows unchanged.

    Raises:
        UserError: The row lacks something that its data set needs, such as tests; or it may belong to several sets.
    """
    name = _data_set_of(row, source)
    if name is None:
        return row
    try:
        return find(name).converted(row)
    except UnusableRowError as error:
        raise UserError(
            f"{source}: columns as in the data set {name}, but the row cannot be used: {error}. Remove such rows, or "
            "set data.prompt_key and data.answer_key to read other columns."
        ) from error


def _data_set_of(row: Row, source: str) -> str | None:
    """Returns the result of `recognize`; raises UserError for a row that may belong to several sets."""
    try:
        return recognize(row)
    except AmbiguousRowError as error:
        raise UserError(
            f"{source}: columns as in the data sets {error}, whose prompts and answers differ. Choose one: `mrl data "
            f"{error.names[0]} --train FILE` writes rows that a run takes as they are; or set data.prompt_key and "
            "data.answer_key to read other columns."
        ) from error


def open_files(files: Sequence[str], key: str, check: Check, *, convert: bool = False) -> RowSource:
    """Opens JSONL (.jsonl, .json) and parquet (.parquet) files as one row source.

    Args:
        files: Paths, in order.
        key: Config key of the paths, for error messages.
        check: Validator that is called with every JSONL row, and with one parquet row of each combination of missing
            values.
        convert: Convert raw rows of public data sets, before they are checked.

    Raises:
        UserError: A file is missing, unreadable, of an unknown type, or without rows.
    """

    def checked(row: Row, source: str) -> None:
        check(convert_row(row, source) if convert else row, source)

    parts: list[RowSource] = []
    for name in files:
        suffix = Path(name).suffix
        if suffix not in (".jsonl", ".json", ".parquet"):
            raise UserError(f"{key}: '{name}' ends in '{suffix}', expected .jsonl or .parquet.")
        part = ParquetRows(name, checked) if suffix == ".parquet" else JsonlRows(name, checked)
        if len(part) == 0:
            raise UserError(f"{key}: '{name}' contains no rows.")
        parts.append(ConvertedRows(part) if convert else part)
    return parts[0] if len(parts) == 1 else ChainedRows(parts)


def _open(path: str) -> Any:
    try:
        return Path(path).open("rb")
    except OSError as error:
        hint = did_you_mean_path(path) or " Check the path."
        raise UserError(f"data: '{path}' cannot be read: {error.strerror}.{hint}") from error


def _reason(error: Exception) -> str:
    return first_line(error).rstrip(".")


EXCERPT_CHARS = 60
"""Characters of a bad line that an error message quotes."""

_BEGINNINGS = {
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
    b"{\x00": "text in UTF-16 or UTF-32",
    b"\x00": "text in UTF-16 or UTF-32, or no text",
    b"\x1f\x8b": "compressed by gzip",
    b"PAR1": "a parquet file",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
}
"""Magic bytes of other file types."""


def _check_text(file: Any, path: str) -> None:
    """Raises UserError if a file starts with the magic bytes of another type; the UTF-8 byte order mark is allowed."""
    first = file.read(4)
    file.seek(0)
    for beginning, what in _BEGINNINGS.items():
        if first.startswith(beginning):
            raise UserError(
                f"data: '{path}' is {what}; expected UTF-8 text, one JSON object per line. Convert it (`iconv -f "
                "UTF-16 -t UTF-8`, `gunzip`), or name a parquet file .parquet."
            )


def _excerpt(line: bytes, error: ValueError) -> str:
    """Returns the quoted part of a line around its JSON error."""
    text = line.strip().decode("utf-8", "replace")
    place = error.pos if isinstance(error, json.JSONDecodeError) else 0
    begin, end = max(0, place - EXCERPT_CHARS // 2), place + EXCERPT_CHARS // 2
    return f"{'...' if begin else ''}{text[begin:end]!r}{'...' if end < len(text) else ''}"


def _parse(line: bytes, source: str) -> Row:
    try:
        row = json.loads(line.strip())
    except UnicodeDecodeError as error:
        raise UserError(
            f"{source}: not UTF-8: byte {error.object[error.start]:#04x} at position {error.start}. Save the file "
            "as UTF-8."
        ) from error
    except ValueError as error:
        array = " A JSON array is not read; write its objects one per line." if line.lstrip()[:1] == b"[" else ""
        where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        what = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(
            f"{source}: not JSON: {what}{where}; the line is {_excerpt(line, error)}. Expected one JSON object per "
            f"line.{array}"
        ) from error
    except RecursionError as error:
        raise UserError(f"{source}: its lists and objects are nested too deeply.") from error
    if not isinstance(row, dict):
        raise UserError(f"{source}: the line is a JSON {type(row).__name__}, expected one JSON object per line.")
    return row
