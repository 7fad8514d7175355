r"""MATH (Hendrycks et al., 2021): competition mathematics with boxed answers; held out are the questions of MATH-500.

The rows come from https://huggingface.co/datasets/DigitalLearningGmbH/MATH-lighteval and
https://huggingface.co/datasets/HuggingFaceH4/MATH-500, the prompt from verl's
example. Rows of other collections with a problem and a solution or an answer
(DeepScaleR, NuminaMath) convert alike.
"""

from __future__ import annotations

from mrl.config.boxed import last_boxed
from mrl.data.public_sets.base import HubFiles, PublicSet, Row, UnusableRowError, rest_of, text_of, user

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
SOURCE = "DigitalLearningGmbH/MATH-lighteval"


def recognizes(row: Row) -> bool:
    """Returns whether a row has a problem, and a solution or an answer."""
    return isinstance(row.get("problem"), str) and any(row.get(name) is not None for name in ("solution", "answer"))


def convert(row: Row) -> Row:
    """Returns the prompt, the column "answer" or else the last box of the solution, and level and subject."""
    solution = row.get("solution")
    if row.get("answer") is not None:
        answer = text_of(row, "answer")
    else:
        found = (last_boxed(text_of(row, "solution")) or "").strip()
        if not found:
            raise UnusableRowError("no closed \\boxed{...} in column solution, and no column answer")
        answer = found
    is_math = "level" in row and ("type" in row or "subject" in row)
    return {
        "prompt": user(f"{text_of(row, 'problem')} {INSTRUCTION}"),
        "answer": answer,
        **({"data_source": SOURCE} if is_math else rest_of(row, "data_source")),
        **({"solution": solution} if isinstance(solution, str) else {}),
        **rest_of(row, "level", "type", "subject"),
    }


DATA_SET = PublicSet(
    description="competition mathematics: 7,500 training questions; held out: the 500 of MATH-500",
    train=(HubFiles("hf://datasets/DigitalLearningGmbH/MATH-lighteval/data/train-*.parquet", SOURCE),),
    val=(HubFiles("hf://datasets/HuggingFaceH4/MATH-500/test.jsonl", "HuggingFaceH4/MATH-500"),),
    recognizes=recognizes,
    convert=convert,
    reward={"name": "math"},
    prompt_length=1024,
    response_length=2048,
    consumed=("problem",),
)
