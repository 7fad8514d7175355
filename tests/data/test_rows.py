import json

import pyarrow
import pyarrow.parquet
import pytest

from mrl.data.rows import ParquetRows, open_files
from mrl.errors import UserError


def accept(row, source):
    """Any row will do."""


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path, rows, **options):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return str(path)


def numbered(count):
    return [{"prompt": f"π{index}", "answer": index} for index in range(count)]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_rows_come_by_index_in_any_order(tmp_path, write):
    suffix = {"write_jsonl": "jsonl", "write_parquet": "parquet"}[write.__name__]
    rows = open_files([write(tmp_path / f"a.{suffix}", numbered(20))], "data.train_files", accept)
    assert len(rows) == 20
    assert [rows.row(index) for index in (19, 0, 7, 7)] == [numbered(20)[index] for index in (19, 0, 7, 7)]


def test_a_source_names_file_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"prompt": "x"}\n\n{"prompt": "y"}', encoding="utf-8")
    rows = open_files([str(path)], "data.train_files", accept)
    assert [rows.source(index) for index in range(2)] == [f"{path}:2", f"{path}:4"]
    assert rows.row(1) == {"prompt": "y"}


def test_files_are_chained_in_order(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", numbered(3))
    second = write_parquet(tmp_path / "b.parquet", numbered(2))
    rows = open_files([first, second], "data.train_files", accept)
    assert [rows.row(index)["answer"] for index in range(len(rows))] == [0, 1, 2, 0, 1]
    assert rows.source(2) == f"{first}:3"
    assert rows.source(3) == f"{second}:0"


def test_parquet_keeps_recent_row_groups_within_its_budget(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", numbered(100), row_group_size=10)
    rows = ParquetRows(path, accept, cache_bytes=1)
    assert [rows.row(index)["answer"] for index in (5, 95, 6, 50)] == [5, 95, 6, 50]
    assert len(rows._cache) == 1
    roomy = ParquetRows(path, accept)
    assert [roomy.row(index)["answer"] for index in range(100)] == list(range(100))
    assert len(roomy._cache) == 10


def test_the_fingerprint_follows_content_and_order_not_names(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", numbered(3))
    renamed = write_jsonl(tmp_path / "renamed.jsonl", numbered(3))
    changed = write_jsonl(tmp_path / "changed.jsonl", [*numbered(2), {"prompt": "other", "answer": 2}])

    def fingerprint(*files):
        return open_files(files, "data.train_files", accept).fingerprint

    assert fingerprint(first) == fingerprint(renamed)
    assert fingerprint(first) != fingerprint(changed)
    assert fingerprint(first, changed) != fingerprint(changed, first)


def test_every_jsonl_row_is_checked_when_the_file_is_opened(tmp_path):
    def refuse_two(row, source):
        if row["answer"] == 2:
            raise UserError(f"{source}: two")

    with pytest.raises(UserError, match=r"a.jsonl:3: two"):
        open_files([write_jsonl(tmp_path / "a.jsonl", numbered(5))], "data.train_files", refuse_two)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": \n', r"a.jsonl:2: not JSON"),
        ("a.jsonl", '[{"prompt": "x"}]', r"a.jsonl:1: holds list, expected one JSON object per line"),
        ("a.jsonl", "\n\n", r"'.*a.jsonl' holds no rows"),
        ("a.jsonl", b"\xff\xfe{", r"a.jsonl:1: not JSON"),
        ("a.csv", "prompt\nx\n", r"ends in '.csv', expected .jsonl or .parquet"),
        ("a.parquet", "this is no parquet", r"a.parquet' is not a readable parquet file"),
    ],
)
def test_unusable_files_are_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        open_files([str(path)], "data.train_files", accept)


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.jsonl' cannot be read: No such file"):
        open_files([str(tmp_path / "nowhere.jsonl")], "data.train_files", accept)
    with pytest.raises(UserError, match=r"nowhere.parquet' cannot be read: No such file"):
        open_files([str(tmp_path / "nowhere.parquet")], "data.train_files", accept)
    with pytest.raises(UserError, match=r"holds no rows"):
        empty = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
        pyarrow.parquet.write_table(empty, tmp_path / "empty.parquet")
        open_files([str(tmp_path / "empty.parquet")], "data.train_files", accept)
