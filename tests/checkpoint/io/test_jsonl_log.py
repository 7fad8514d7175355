"""JSON lines that survive a kill: whole lines, exact floats, merged steps, cut back on resume."""

import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
import time

import pytest

from mrl.checkpoint.io.jsonl_log import StepFile, encode, number, read_rows, truncate_rows
from mrl.errors import UserError


def test_floats_round_trip_bit_for_bit(tmp_path):
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 2**53 + 1.0]
    file = StepFile(tmp_path / "m.jsonl")
    file.put("train", 1, {f"v{i}": value for i, value in enumerate(values)})
    file.close()
    (row,) = read_rows(tmp_path / "m.jsonl")
    for i, value in enumerate(values):
        assert struct.pack("d", row[f"v{i}"]) == struct.pack("d", value)


def test_values_that_json_lacks_are_valid_json_and_come_back():
    line = encode({"a": math.nan, "b": math.inf, "c": [-math.inf], "text": "Infinity"})

    def refuse(constant):
        raise AssertionError(constant)

    row = json.loads(line, parse_constant=refuse)
    assert math.isnan(number(row["a"]))
    assert number(row["b"]) == math.inf
    assert number(row["c"][0]) == -math.inf
    assert number("a word") is None


def test_any_text_is_one_line_of_utf8_and_comes_back():
    text = 'two\nlines \u2028 "quoted" \x1b[31m é 漢 \ud800'
    line = encode({"response": text})
    assert line.count(b"\n") == 1
    assert "漢".encode() in line
    assert json.loads(line.decode("utf-8"))["response"] == text


def test_later_values_of_a_step_join_its_line(tmp_path):
    path = tmp_path / "m.jsonl"
    file = StepFile(path)
    file.put("train", 0, {"val/accuracy": 0.25})
    file.put("train", 1, {"val/accuracy": 0.0625})
    file.put("train", 1, {"critic/score/mean": 0.75})
    file.put("train", 1, {"val/accuracy": 1.0})  # shorter than before
    file.close()
    assert path.read_text().splitlines() == [
        '{"step": 0, "phase": "train", "val/accuracy": 0.25}',
        '{"step": 1, "phase": "train", "val/accuracy": 1.0, "critic/score/mean": 0.75}',
    ]


def test_a_reopened_file_joins_its_last_line(tmp_path):
    path = tmp_path / "m.jsonl"
    for values in ({"a": 1.0}, {"b": 2.0}):
        file = StepFile(path)
        file.put("train", 3, values)
        file.close()
    assert read_rows(path) == [{"step": 3, "phase": "train", "a": 1.0, "b": 2.0}]


def test_a_step_before_the_last_one_is_refused(tmp_path):
    file = StepFile(tmp_path / "m.jsonl")
    file.put("train", 2, {"a": 1.0})
    with pytest.raises(RuntimeError, match="step 1 came after step 2"):
        file.put("train", 1, {"a": 1.0})
    file.close()


def test_cut_back_keeps_bytes_and_drops_a_half_line(tmp_path):
    path = tmp_path / "m.jsonl"
    whole = b"".join(encode({"step": step, "phase": "train", "x": step / 3}) for step in (1, 2, 3))
    path.write_bytes(whole + b'{"step": 4, "pha')
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]
    truncate_rows(path, lambda row: row["step"] <= 2)
    assert path.read_bytes() == whole[: whole.index(b'{"step": 3')]


def test_a_damaged_line_in_the_middle_names_file_and_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1, "phase": "train"}\nrubbish\n')
    with pytest.raises(UserError, match=r"m\.jsonl', line 2 is not a JSON object"):
        read_rows(path)


@pytest.mark.parametrize(
    ("bad", "named", "num_more"), [([2], [2], 0), ([1, 3, 5], [1, 3, 5], 0), (range(1, 26), range(1, 11), 15)]
)
def test_all_bad_lines_are_named_in_one_error_up_to_ten(bad, named, num_more, tmp_path):
    path = tmp_path / "m.jsonl"
    kinds = (b"rubbish\n", b"[1]\n", b'{"phase": "train"}\n', b"\n", b'{"step": -1, "phase": "train"}\n')
    good = encode({"step": 1, "phase": "train"})
    path.write_bytes(b"".join(kinds[line % len(kinds)] if line in bad else good for line in range(1, 26)) + b"{half")
    for read in (read_rows, StepFile, lambda file: truncate_rows(file, lambda row: True)):
        before = path.read_bytes()
        with pytest.raises(UserError) as caught:
            read(path)
        assert [int(number) for number in re.findall(r"line (\d+) ", str(caught.value))] == list(named)
        assert ("15 more" in str(caught.value)) == bool(num_more) and path.read_bytes() == before


WRITER = """
import itertools, pathlib, sys
from mrl.checkpoint.io.jsonl_log import StepFile
file = StepFile(pathlib.Path(sys.argv[1]))
for step in itertools.count(1):
    file.put("train", step, {"x": step / 7, "pad": "." * (step % 997)})
    file.put("train", step, {"y": step / 11})
"""


def test_after_kill_9_at_any_moment_every_line_is_whole(tmp_path):
    path = tmp_path / "m.jsonl"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], env=environment)
    while not path.exists() or path.stat().st_size < 200_000:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    rows = read_rows(path)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) > 100
    assert all(row["y"] == row["step"] / 11 for row in rows[:-1])
    truncate_rows(path, lambda row: row["step"] <= 100)
    file = StepFile(path)
    file.put("train", 101, {"x": 0.0})
    file.close()
    assert len(read_rows(path)) == 101
