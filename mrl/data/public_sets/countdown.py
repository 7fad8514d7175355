"""Countdown (TinyZero): an equation from three or four numbers that gives a target.

The rows come from https://huggingface.co/datasets/Jiayi-Pan/Countdown-Tasks-3to4. The prompt is TinyZero's
without its system text and the words that begin the answer.
"""

from __future__ import annotations

import json
from typing import Any

from mrl.data.public_sets.base import HubFiles, PublicSet, Row, UnusableRowError, user


def recognizes(row: Row) -> bool:
    """Returns whether a row has numbers and a target."""
    return "nums" in row and "target" in row


def convert(row: Row) -> Row:
    """Returns the prompt, and the answer as JSON that the reward `countdown` reads: target and numbers."""
    numbers, target = row.get("nums"), row.get("target")
    if not isinstance(numbers, list) or not numbers or not all(_is_integer(one) for one in (*numbers, target)):
        raise UnusableRowError("columns nums and target are not integers")
    return {
        "prompt": user(
            f"Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic "
            "operations (+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. "
            "And return the final answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
        ),
        "answer": json.dumps({"target": target, "numbers": numbers}),
        "data_source": "countdown",
    }


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


DATA_SET = PublicSet(
    description="equations from 3 or 4 numbers: about 490,000 tasks, the last 1,024 of them held out",
    train=(HubFiles("hf://datasets/Jiayi-Pan/Countdown-Tasks-3to4/data/train-*.parquet"),),
    val=(),
    recognizes=recognizes,
    convert=convert,
    reward={"name": "countdown", "kwargs": {"format_score": 0.1}},
    prompt_length=256,
    response_length=1024,
    num_val=1024,
    consumed=("nums", "target"),
)
