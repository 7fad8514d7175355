"""Broken data files: JSONL and parquet, cut, of wrong types, nested, in other encodings, and what is no file at all."""

# ruff: noqa: E501 -- tables of odd things
from __future__ import annotations

import io
import json
import random
from functools import cache

import pyarrow
import pyarrow.parquet

from tests.fuzz.cases import Case

GOOD = {"prompt": "<1+1>", "answer": "2"}
VALUES = (
    None, True, 0, -1, 2.5, 1e300, float("nan"), float("inf"), 10**400, "", " ", "x", "<" * 50, "\ud800", "\0", "😀", "\x1b[2J",
    [], [1], {}, {"role": "user"}, [{}], [{"role": "user"}], [{"role": "user", "content": "<1+1>"}], [{"role": 1, "content": 2}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}], [[]], {"a": {"b": []}}, "<1+1>" * 10_000,
)  # fmt: skip
NAMES = ("prompt", "answer", "extra", "", "a.b", "\ud800", "prompt.x", "x" * 3000)
KEYS = ("prompt", "answer", "extra_info.answer", "", ".", "..", "a.b.c", "prompt.x", "\u202e", "x" * 2000)
SPECIAL = ("folder", "fifo", "unreadable", "loop", "device")


def case(number: int) -> Case:
    """The broken file of a number."""
    draw = random.Random(f"data {number}")
    ending = draw.choice(("jsonl", "jsonl", "json", "parquet", "parquet"))
    name = f"broken.{ending}"
    side = draw.choice(("train_files", "train_files", "val_files"))
    words = [f"data.{side}=[{name}]"]
    if draw.random() < 0.2:
        words.append(
            f"data.{draw.choice(('prompt_key', 'answer_key', 'response_key', 'system_prompt'))}='{draw.choice(KEYS)}'"
        )
    if draw.random() < 0.2:
        words.append(f"data.overlong_prompts={draw.choice(('drop', 'truncate_left', 'error'))}")
    if draw.random() < 0.1:
        words += ["train.warm_start.num_steps=1", "train.warm_start.batch_size=2"]
    command = draw.choice(
        ("dry run", "dry run", "dry run", "train", "train", "plan", "rehearse", "evaluate", "doctor", "launch")
    )
    made = Case(f"data {number}", command=command, overrides=tuple(words))
    if draw.random() < 0.05:
        made.make[name] = draw.choice(SPECIAL)
    else:
        made.files[name] = draw.choice(PARQUET if ending == "parquet" else JSONL)(draw)
    return made


def _row(draw: random.Random) -> dict:
    row = dict(GOOD)
    for _ in range(draw.choice((1, 2))):
        row[draw.choice(NAMES)] = draw.choice(VALUES)
    return row


def _lines(rows: list) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def _rows(draw: random.Random) -> bytes:
    rows = [dict(GOOD) for _ in range(3)]
    rows.insert(draw.randrange(4), _row(draw))
    return _lines(rows)


def _text(draw: random.Random) -> bytes:
    good = _lines([GOOD] * 3)
    return draw.choice((
        b"", b"\n\n\n", b" ", b"\0" * 100, b"\xef\xbb\xbf" + good, good.decode().encode("utf-16"), good.replace(b"\n", b"\r\n"),
        good.replace(b"\n", b"\r"), good + b"\xff\xfe", b"null\n", b"3\n", b'"text"\n', b"[]\n", b"NaN\n", b"{}\n", b"{}" * 3 + b"\n",
        json.dumps([GOOD] * 3).encode(), json.dumps([GOOD] * 3, indent=1).encode(), good.replace(b'"', b"'"), b"[" * 200_000 + b"\n",
        b'{"a":' * 100_000 + b"\n", good + b"{\n", b"PK\x03\x04" + good, b"\x1f\x8b" + good, b"PAR1" + good + b"PAR1",
        b'{"prompt": "' + b"<1+1>" * 500_000 + b'", "answer": "2"}\n', b'{"prompt": "\\ud800", "answer": "2"}\n',
        b'{"prompt": "<1+1>", "answer": ' + b"9" * 5000 + b"}\n", b'{"prompt": "<1+1>", "answer": 1e999}\n',
        b'{"prompt": "<1+1>", "prompt": 3, "answer": "2"}\n', good * 3000 + b"{", b'{"prompt": "\xff\xfe", "answer": "2"}\n',
        b'{"prompt": "<1+1>", "answer": "2", "x": ' + b"[" * 500 + b"]" * 500 + b"}\n", b'{"prompt": "a\\u0000b", "answer": "2"}\n',
    ))  # fmt: skip


def _cut(draw: random.Random) -> bytes:
    good = _lines([GOOD] * 3)
    return good[: draw.randrange(len(good))]


def _flipped(draw: random.Random) -> bytes:
    return _spoilt(draw, _lines([GOOD] * 3))


def _spoilt(draw: random.Random, good: bytes) -> bytes:
    content = bytearray(good)
    for _ in range(draw.choice((1, 2, 8, 40))):
        content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content)


def _random(draw: random.Random) -> bytes:
    return draw.randbytes(draw.choice((1, 4, 8, 100, 5000)))


JSONL = (_rows, _rows, _text, _text, _cut, _flipped, _random)


@cache
def _parquets() -> tuple[bytes, ...]:
    """Whole files, of good and of wrong columns."""
    deep = GOOD
    for _ in range(30):
        deep = {"a": deep}
    tables = [
        pyarrow.table({"prompt": ["<1+1>"] * 3, "answer": ["2"] * 3}),
        pyarrow.table({"prompt": ["<1+1>"] * 3}),
        pyarrow.table({"prompt": pyarrow.array([], pyarrow.string()), "answer": pyarrow.array([], pyarrow.string())}),
        pyarrow.table({}),
        pyarrow.table({"prompt": [None, "<1+1>", "<1+1>"], "answer": ["2"] * 3}),
        pyarrow.table({"prompt": ["<1+1>", None, "<1+1>"], "answer": ["2", None, "2"]}),
        pyarrow.table({"prompt": [1, 2, 3], "answer": [1.5, float("nan"), float("inf")]}),
        pyarrow.table({"prompt": [b"<1+1>", b"\xff", b""], "answer": [b"2"] * 3}),
        pyarrow.table({"prompt": [[{"role": "user", "content": "<1+1>"}]] * 3, "answer": ["2"] * 3}),
        pyarrow.table({"prompt": [[{"role": "user", "content": None}]] * 3, "answer": ["2"] * 3}),
        pyarrow.table({"prompt": ["<1+1>"] * 3, "answer": ["2"] * 3, "reward_model": [{"ground_truth": ["2"]}] * 3}),
        pyarrow.table({"prompt": ["<1+1>"] * 3, "answer": pyarrow.array([1, 2, 3], pyarrow.timestamp("s"))}),
        pyarrow.table({"prompt": ["<1+1>"] * 3, "answer": pyarrow.array([1, 2, 3], pyarrow.decimal128(5, 2))}),
        pyarrow.table({"prompt": ["<1+1>"] * 3, "answer": pyarrow.array(["a", "b", "a"]).dictionary_encode()}),
        pyarrow.table([["<1+1>"] * 3, ["2"] * 3, ["3"] * 3], names=["prompt", "answer", "answer"]),
        pyarrow.Table.from_pylist([{"prompt": "<1+1>", "answer": "2", "deep": deep}] * 3),
        pyarrow.table({"prompt": pyarrow.array([0, 1, 2], pyarrow.duration("ns")), "answer": ["2"] * 3}),
        pyarrow.table({"prompt": ["<1+1>"] * 3, "answer": pyarrow.array([2**62] * 3, pyarrow.timestamp("us", tz="Mars/Base"))}),
    ]  # fmt: skip
    return tuple(
        _parquet(table, **options) for table in tables for options in ({}, {"compression": "gzip", "row_group_size": 1})
    )


def _parquet(table: pyarrow.Table, **options: object) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(table, stream, **options)
    return stream.getvalue()


def _of_wrong_columns(draw: random.Random) -> bytes:
    return draw.choice(_parquets())


def _cut_parquet(draw: random.Random) -> bytes:
    good = draw.choice(_parquets())
    return good[: draw.randrange(len(good))]


def _spoilt_parquet(draw: random.Random) -> bytes:
    return _spoilt(draw, draw.choice(_parquets()[:2]))


def _no_parquet(draw: random.Random) -> bytes:
    return draw.choice(
        (
            b"",
            b"PAR1",
            b"PAR1PAR1",
            b"PAR1" + bytes(8) + b"PAR1",
            b"PAR1" + b"\xff" * 8 + b"PAR1",
            _lines([GOOD]),
            draw.randbytes(500),
        )
    )


PARQUET = (_of_wrong_columns, _of_wrong_columns, _cut_parquet, _spoilt_parquet, _spoilt_parquet, _no_parquet)
