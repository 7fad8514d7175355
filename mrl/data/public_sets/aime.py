"""AIME 2024 and 2025: 60 competition problems with integer answers, for evaluation only.

The rows come from https://huggingface.co/datasets/HuggingFaceH4/aime_2024 and
https://huggingface.co/datasets/math-ai/aime25. Copies with other column names (Problem and Answer, question and answer)
convert too.
"""

from __future__ import annotations

from mrl.config.boxed import last_boxed
from mrl.data.public_sets.base import HubFiles, PublicSet, Row, UnusableRowError, rest_of, text_of, user
from mrl.data.public_sets.math import INSTRUCTION


def recognizes(row: Row) -> bool:
    """Returns whether a row has the columns Problem and Answer; rows in lower case are recognized as `math`."""
    return isinstance(row.get("Problem"), str) and row.get("Answer") is not None


def convert(row: Row) -> Row:
    """Returns the prompt, and the answer without leading zeros: 025 becomes 25."""
    answer = text_of(row, "answer", "Answer", "solution")
    answer = (last_boxed(answer) or answer).strip()
    if not (answer.isascii() and answer.isdecimal()):
        raise UnusableRowError(f"the answer {answer[:40]!r} is not an integer")
    return {
        "prompt": user(f"{text_of(row, 'problem', 'Problem', 'question')} {INSTRUCTION}"),
        "answer": str(int(answer)),
        "data_source": "aime",
        **rest_of(row, "id", "ID", "year"),
    }


DATA_SET = PublicSet(
    description="AIME 2024 and 2025: 60 held-out competition problems with integer answers, no training questions",
    train=(),
    val=(
        HubFiles("hf://datasets/HuggingFaceH4/aime_2024/data/train-*.parquet", "aime_2024"),
        HubFiles("hf://datasets/math-ai/aime25/test*", "aime_2025"),
    ),
    recognizes=recognizes,
    convert=convert,
    reward={"name": "math"},
    prompt_length=1024,
    response_length=8192,
    settings={"rollout.val_kwargs": {"n": 16, "do_sample": True}},
    consumed=("question", "problem", "Problem", "Answer", "solution"),
)
