"""Data of a test case: a synthetic task, files of strings, or files of chat messages.

Prompts differ from their first token, have different lengths and repeat; some are too long if the config handles that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

Rows = list[dict[str, Any]]

CHARACTERS = "0123456789<>+-=?|ausS_#"
"""Vocabulary of every tokenizer; the last character ends a response."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}{{ message['content'] }}|{% endfor %}a"
TEMPLATE_FILE = "template.jinja"
LONGEST = 14
"""Length of the longest prompt, tokens."""


@dataclass(frozen=True)
class Data:
    """Data of a test case.

    Attributes:
        settings: Config values of the sections data and rollout.
        rows: Contents of data files by name.
        held_out: True if there are held-out prompts.
        is_chat: True if prompts are messages, so that the tokenizer needs a chat template.
        characters: Vocabulary of the tokenizer.
    """

    settings: dict[str, Any]
    rows: dict[str, Rows]
    held_out: bool
    is_chat: bool
    characters: str = CHARACTERS


def draw_data(rng: Random) -> Data:
    """Draws prompts and answers."""
    kind = rng.choice(("task", "strings", "strings", "strings", "chat"))
    common: dict[str, Any] = {"rollout.prompt_length": LONGEST, "data.shuffle": rng.random() < 0.7}
    if kind == "task":
        arguments = {"min_terms": 2, "max_terms": 3, "max_value": 9, "num_train": rng.choice((7, 50)), "num_val": 5}
        return Data(common | {"data.task": "addition", "data.task_kwargs": arguments}, {}, True, False)
    make = _chat if kind == "chat" else rng.choice((_question, _question, _same_start))
    suffix = rng.choice(("jsonl", "jsonl", "parquet"))
    held_out = rng.random() < 0.7
    rows = {f"train.{suffix}": [_row(rng, make) for _ in range(rng.choice((9, 24)))]}
    common["data.train_files"] = [f"./train.{suffix}"]
    if held_out:
        rows[f"val.{suffix}"] = [_row(rng, make) for _ in range(5)]
        common["data.val_files"] = [f"./val.{suffix}"]
    if rng.random() < 0.3:
        common["data.response_key"] = "response"
    if rng.random() < 0.3:
        common |= {"rollout.prompt_length": 6, "data.overlong_prompts": rng.choice(("drop", "truncate_left"))}
        for part in rows.values():
            part.append({"prompt": make(Random(0), short=True), "answer": "3", "response": "4"})
    if kind == "chat":
        common["data.chat_template"] = f"./{TEMPLATE_FILE}"
        common["rollout.prompt_length"] = 2 * LONGEST
        if rng.random() < 0.5:
            common["data.system_prompt"] = "S"
    return Data(common, rows, held_out, kind == "chat")


def write_rows(file: Path, rows: Rows) -> None:
    """Writes rows as JSONL or parquet, by the file's suffix."""
    if file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _row(rng: Random, make: Callable[..., Any]) -> dict[str, Any]:
    answer = rng.randrange(20)
    return {"prompt": make(rng, short=rng.random() < 0.4), "answer": str(answer), "response": str(answer + 1)}


def _question(rng: Random, *, short: bool) -> str:
    """Returns a prompt that starts with any of many tokens."""
    first, second = rng.randrange(10 if short else 100), rng.randrange(10 if short else 100)
    return rng.choice(("{}+{}>", "<{}-{}>", "={}+{}?", "?{}", "_{}_{}", "{}")).format(first, second)


def _same_start(rng: Random, *, short: bool) -> str:
    """Returns a prompt that starts like the others."""
    return "<" + "+".join(str(rng.randrange(10)) for _ in range(2 if short else 5)) + ">"


def _chat(rng: Random, *, short: bool) -> list[dict[str, str]]:
    asked = {"role": "user", "content": _question(rng, short=True)}
    if short or rng.random() < 0.5:
        return [asked]
    return [asked, {"role": "assistant", "content": str(rng.randrange(10))}, {"role": "user", "content": "?"}]
