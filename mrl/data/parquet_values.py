"""Values of parquet columns: which rows to check at the start, and 32-bit floats as the numbers that were written.

All rows of a parquet file have the same columns and types, so that a row is unusable mostly for what it lacks. Rows
that lack the same parts are alike: one of each kind is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Convert = Callable[[Any], Any]


def columns_with_gaps(file: Any, group: int) -> list[str]:
    """Returns the top-level columns of a row group that may hold nulls, empty lists or floats that are not finite.

    Args:
        file: A `pyarrow.parquet.ParquetFile`; its statistics tell which columns have no nulls.
        group: Index of the row group.
    """
    import pyarrow

    metadata = file.metadata.row_group(group)
    found: dict[str, None] = {}
    for place in range(metadata.num_columns):
        column = metadata.column(place)
        statistics = column.statistics
        has_nulls = statistics is None or not statistics.has_null_count or statistics.null_count > 0
        if has_nulls or column.physical_type in ("FLOAT", "DOUBLE"):
            found[column.path_in_schema.partition(".")[0]] = None
    names = file.schema_arrow.names  # a name with a dot in it is cut short above
    known = [name for name in names if name in found or any(name.startswith(f"{part}.") for part in found)]
    return [name for name in known if not pyarrow.types.is_null(file.schema_arrow.field(name).type)]


def kinds_of_gaps(table: Any) -> Iterator[tuple[int, bytes]]:
    """Yields the first row of each kind of a table, and the kind: which parts of the row are missing.

    Args:
        table: A `pyarrow.Table` with at least one column.
    """
    flags = [gap for column in table.columns for gap in _gaps(column.combine_chunks())]
    kinds, first = np.unique(np.stack(flags, axis=1), axis=0, return_index=True)
    for kind, row in zip(kinds, first.tolist(), strict=True):
        yield row, np.packbits(kind).tobytes()


def _gaps(array: Any) -> list[Any]:
    """Returns flags [num_rows] of an array: null, empty or not finite, and those of the parts of its values."""
    import pyarrow
    import pyarrow.compute as pc

    kind = array.type
    flags = [array.is_null().to_numpy(zero_copy_only=False)]
    if pyarrow.types.is_floating(kind):
        flags.append(~pc.fill_null(pc.is_finite(array), True).to_numpy(zero_copy_only=False))
    elif pyarrow.types.is_struct(kind):
        for place in range(kind.num_fields):
            flags += _gaps(pc.struct_field(array, [place]))
    elif pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        flags.append(pc.fill_null(pc.equal(pc.list_value_length(array), 0), False).to_numpy(zero_copy_only=False))
        rows = pc.list_parent_indices(array).to_numpy(zero_copy_only=False)
        for inner in _gaps(pc.list_flatten(array)):
            flag = np.zeros(len(array), dtype=bool)
            flag[rows[inner]] = True
            flags.append(flag)
    return flags


def float_reader(kind: Any) -> Convert | None:
    """Returns what turns a value of this type into the numbers that were written; None: they are so already.

    A 32-bit 0.1 is 0.10000000149011612 as a Python float. The shortest decimal that rounds to it is 0.1.

    Args:
        kind: A `pyarrow.DataType`.
    """
    import pyarrow

    if pyarrow.types.is_float32(kind) or pyarrow.types.is_float16(kind):
        narrow = np.float32 if pyarrow.types.is_float32(kind) else np.float16
        return lambda value: None if value is None else float(str(narrow(value)))
    if pyarrow.types.is_struct(kind):
        inner = {kind.field(place).name: float_reader(kind.field(place).type) for place in range(kind.num_fields)}
        readers = {name: reader for name, reader in inner.items() if reader is not None}
        return _of_struct(readers) if readers else None
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        reader = float_reader(kind.value_type)
        return None if reader is None else _of_list(reader)
    return None


def _of_struct(readers: dict[str, Convert]) -> Convert:
    def read(value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        return value | {name: reader(value[name]) for name, reader in readers.items()}

    return read


def _of_list(reader: Convert) -> Convert:
    return lambda values: None if values is None else [reader(value) for value in values]
