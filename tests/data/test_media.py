"""Rows with images, videos or audio are refused by the name of what came; everything else stays text."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from mrl.config.config import DataConfig, ModelConfig
from mrl.data.prompts import load_training
from mrl.data.tokenizer import load_tokenizer
from mrl.errors import UserError
from tests.data.folders import byte_bpe_folder

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = byte_bpe_folder(tmp_path_factory.mktemp("bpe"))
    return load_tokenizer(ModelConfig(tokenizer=str(folder)), DataConfig())


def prompts(tokenizer, folder, rows, **data):
    """The prompts of a file with these rows, in order: parquet where a value has bytes, else JSONL."""
    if b"PNG" in repr(rows).encode():
        file = folder / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file = folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = load_training(
        DataConfig(train_files=[str(file)], shuffle=False, **data), tokenizer, prompt_length=99, seed=0
    )
    return stream.next(len(rows))


def talk(content):
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"prompt": talk("<image>What is it?"), "images": [{"bytes": PNG, "path": None}]}, "images"),
        ({"prompt": talk("What is it?"), "image": {"bytes": PNG, "path": "a.png"}}, "image"),
        ({"prompt": "<image>", "images": ["a.png", "b.png"]}, "images"),
        ({"prompt": "<video>", "videos": [{"video": "a.mp4", "fps": 2}]}, "videos"),
        ({"prompt": "<audio>", "audio": {"array": [0.1], "sampling_rate": 16000}}, "audio"),
        ({"prompt": "<image>", "image": "https://there/a.JPG"}, "image"),
        ({"prompt": "x", "image": "data:image/png;base64,AAAA"}, "image"),
        ({"prompt": [{**talk("x")[0], "images": ["AAAA"]}]}, "images"),
        ({"messages": [{**talk("x")[0], "audio": {"path": "a.wav"}}, {"role": "assistant", "content": "y"}]}, "audio"),
        ({"chosen": talk("x"), "rejected": talk("y"), "images": ["a.png"]}, "images"),
    ],
)
def test_a_row_with_a_medium_is_refused_by_its_column(row, name, tokenizer, tmp_path):
    with pytest.raises(UserError, match=rf"rows\.\w+:\d.*'{name}' holds"):
        prompts(tokenizer, tmp_path, [{"answer": "1", **row}])


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image"}, "image"),
        ({"type": "image_url", "image_url": {"url": "a.png"}}, "image_url"),
        ({"type": "video", "video": "a.mp4"}, "video"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "input_audio"),
        ({"text": "no type"}, "None"),
        ({"type": "text"}, "text"),
    ],
)
@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_a_part_that_is_not_text_is_refused_by_its_type(part, kind, column, tokenizer, tmp_path):
    messages = [*talk([{"type": "text", "text": "What is it?"}, part]), {"role": "assistant", "content": "A cat."}]
    with pytest.raises(UserError, match=rf"rows\.jsonl:1: column '{column}'.*type '?{kind}"):
        prompts(tokenizer, tmp_path, [{column: messages, "answer": "1"}])


def test_a_later_row_of_parquet_is_refused_too(tokenizer, tmp_path):
    rows = [{"prompt": "x", "answer": "1", "images": [], "data": PNG}] * 3
    rows.append({**rows[0], "images": [{"bytes": PNG}]})
    with pytest.raises(UserError, match=r"rows\.parquet:3: 'images' holds"):
        prompts(tokenizer, tmp_path, rows)


def test_text_parts_are_one_text(tokenizer, tmp_path):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1+1?", "image": None}]
    joined, text = prompts(
        tokenizer, tmp_path, [{"prompt": talk(given), "answer": "2"} for given in (parts, "What is 1+1?")]
    )
    assert joined.prompt_ids == text.prompt_ids and joined.question == talk("What is 1+1?")


@pytest.mark.parametrize(
    "columns",
    [
        {}, {"images": []}, {"images": None, "video": None}, {"image": ""}, {"image": "python:3.11"},
        {"image": "registry/swe/django__1:latest"}, {"audio": 3}, {"image": {"width": 3}}, {"pictures": ["a.png"]},
    ],
)  # fmt: skip
def test_a_placeholder_without_a_medium_is_ordinary_text(columns, tokenizer, tmp_path):
    (prompt,) = prompts(tokenizer, tmp_path, [{"prompt": "Say <image> and <video>.", "answer": "1", **columns}])
    assert prompt.text == "Say <image> and <video>." and {**columns}.items() <= prompt.extra.items()
