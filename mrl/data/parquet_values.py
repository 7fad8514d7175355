"""Values of parquet columns: which rows to check at startup, and decimal values of 32-bit floats.

All rows of a parquet file have the same columns and types, so a row is mostly unusable because of missing values. One
row for each combination of missing values is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Convert = Callable[[Any], Any]


def columns_with_gaps(file: Any, group: int) -> list[str]:
    """Returns the top-level columns of a row group that may hold nulls, empty lists or floats that are not finite.

    Args:
        file: Open `pyarrow.parquet.ParquetFile`; its statistics say which columns have no nulls.
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
    names = file.schema_arrow.names  # the loop above cuts a name at its first dot
    known = [name for name in names if name in found or any(name.startswith(f"{part}.") for part in found)]
    return [name for name in known if not pyarrow.types.is_null(file.schema_arrow.field(name).type)]


def kinds_of_gaps(table: Any) -> Iterator[tuple[int, bytes]]:
    """Yields (row index, combination) for the first row of each combination of missing values in a table.

    Args:
        table: `pyarrow.Table` with at least one column.
    """
    flags = [gap for column in table.columns for gap in _gaps(column.combine_chunks())]
    kinds, first = np.unique(np.stack(flags, axis=1), axis=0, return_index=True)
    for kind, row in zip(kinds, first.tolist(), strict=True):
        yield row, np.packbits(kind).tobytes()


def _gaps(array: Any) -> list[Any]:
    """Returns boolean flags [num_rows] for null, empty and non-finite values of an array and of its nested values."""
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
    """Returns a function that converts floats of this type to their shortest decimal; None where none is needed.

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
        return _struct_reader(readers) if readers else None
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        reader = float_reader(kind.value_type)
        return None if reader is None else _list_reader(reader)
    return None


def _struct_reader(readers: dict[str, Convert]) -> Convert:
    def read(value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        return value | {name: reader(value[name]) for name, reader in readers.items()}

    return read


def _list_reader(reader: Convert) -> Convert:
    return lambda values: None if values is None else [reader(value) for value in values]
