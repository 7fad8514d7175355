import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from mrl.data.row_sources import ParquetRows, open_files
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
        (
            "a.jsonl",
            '{"prompt": "x"\n{"prompt": "y"}\n',
            r"a.jsonl:1: not JSON: .* at column 15; the line is '{\"prompt",
        ),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": oops}\n', r"a.jsonl:2: not JSON: .* at column 12; .*oops"),
        (
            "a.jsonl",
            '{"prompt": "x"}\n{"a": "' + "x" * 999 + "\n",
            r"a.jsonl:2: not JSON: .* at column 7; .*'\.\.\.\. Exp",
        ),
        ("a.jsonl", '[{"prompt": "x"}]', r"a.jsonl:1: the line is a JSON list, expected one JSON object per line"),
        ("a.jsonl", "\n\n", r"'.*a.jsonl' contains no rows"),
        ("a.jsonl", b"\xff\xfe{", r"a.jsonl' is text in UTF-16"),
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
    with pytest.raises(UserError, match=r"contains no rows"):
        empty = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
        pyarrow.parquet.write_table(empty, tmp_path / "empty.parquet")
        open_files([str(tmp_path / "empty.parquet")], "data.train_files", accept)


def refuse_gaps(row, source):
    """Refuses what a prompt of verl's data must not lack."""
    if row["prompt"] is None or row["model"] is None or row["model"]["truth"] is None or row["list"] == []:
        raise UserError(f"{source}: gap")
    if any(message["role"] is None for message in row["list"] or ()) or (row["number"] or 0) != (row["number"] or 0):
        raise UserError(f"{source}: gap")


GOOD = {
    "prompt": "a",
    "model": {"truth": "1", "note": None},
    "list": [{"role": "user"}],
    "number": 1.5,
    "dotted.name": "x",
}
GAPS = {
    "null text": {"prompt": None},
    "null struct": {"model": None},
    "null in a struct": {"model": {"truth": None, "note": "b"}},
    "empty list": {"list": []},
    "null in a list": {"list": [{"role": "user"}, {"role": None}]},
    "nan": {"number": float("nan")},
}


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("gap", GAPS.values(), ids=GAPS)
def test_a_parquet_row_that_lacks_something_is_found_when_the_file_is_opened(tmp_path, gap, statistics):
    rows = [{**GOOD, "model": {"truth": "1", "note": "b" if index % 2 else None}} for index in range(40)]
    rows[33] = rows[33] | gap
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=10, write_statistics=statistics)
    with pytest.raises(UserError, match="a.parquet:33: gap"):
        open_files([path], "data.train_files", refuse_gaps)
    rows[33] = GOOD
    path = write_parquet(tmp_path / "b.parquet", rows, row_group_size=10, write_statistics=statistics)
    checked = []
    assert len(open_files([path], "data.train_files", lambda row, source: checked.append(row))) == 40
    assert len(checked) <= 4  # one of each kind


def test_narrow_floats_are_the_numbers_that_were_written(tmp_path):
    kinds = {"half": pyarrow.float16(), "single": pyarrow.float32(), "double": pyarrow.float64()}
    nested = pyarrow.struct([("truth", pyarrow.float32())]), pyarrow.list_(pyarrow.float32())
    table = pyarrow.table(
        {name: pyarrow.array([0.1, None, 3.0, -2.5], kind) for name, kind in kinds.items()}
        | {"struct": pyarrow.array([{"truth": 0.7}, None, {"truth": None}, {"truth": 1e-5}], nested[0])}
        | {"list": pyarrow.array([[0.1, None], None, [], [16777217.0]], nested[1])}
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    rows = open_files([str(tmp_path / "a.parquet")], "data.train_files", accept)
    assert [rows.row(index)["single"] for index in range(4)] == [0.1, None, 3.0, -2.5]
    assert [rows.row(index)["half"] for index in range(4)] == [0.1, None, 3.0, -2.5]
    assert [rows.row(index)["double"] for index in range(4)] == [0.1, None, 3.0, -2.5]
    assert [rows.row(index)["struct"] for index in range(4)] == [{"truth": 0.7}, None, {"truth": None}, {"truth": 1e-5}]
    assert [rows.row(index)["list"] for index in range(4)] == [[0.1, None], None, [], [16777216.0]]


LINE = '{"prompt": "é", "answer": "b"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LINE.encode("utf-16"), "is text in UTF-16"),
        (LINE.encode("utf-16-le"), "is text in UTF-16"),
        (LINE.encode("utf-16-be"), "is text in UTF-16"),
        (LINE.encode("utf-32"), "is text in UTF-16"),
        (LINE.encode("latin-1"), "a.jsonl:1: not UTF-8: byte 0xe9 at position 12"),
        (gzip.compress(LINE.encode(), mtime=0), "compressed by gzip"),
        (b"PAR1....", "a parquet file"),
        (b'[{"prompt": "a"},\n{"prompt": "b"}]\n', "A JSON array is not read"),
    ],
    ids=["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "gzip", "parquet", "array"],
)
def test_text_of_another_kind_is_refused_by_what_it_is(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_files([str(tmp_path / "a.jsonl")], "data.train_files", accept)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + LINE.encode())  # UTF-8's byte order mark
    assert open_files([str(tmp_path / "a.jsonl")], "data.train_files", accept).row(0)["prompt"] == "é"


def test_a_damaged_parquet_file_is_refused_by_name(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, [{"prompt": "a" * 40, "answer": str(index)} for index in range(1000)])
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"PAR1" + whole[4:-4] + b"xxxx", whole[:-8] + b"\xff" * 4 + b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="a.parquet' is not a readable parquet file: .* download it again"):
            open_files([str(path)], "data.train_files", accept)
    path.write_bytes(whole[:40] + bytes(range(40, 160)) + whole[160:])
    with pytest.raises(UserError, match=r"a.parquet:0: the row cannot be read: .*damaged"):
        open_files([str(path)], "data.train_files", accept)


def test_a_mistyped_path_is_offered_the_nearest(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", numbered(1))
    with pytest.raises(UserError, match=f"Did you mean '{path}'"):
        open_files([str(tmp_path / "trian.jsonl")], "data.train_files", accept)
