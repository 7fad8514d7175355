"""GSM8K (Cobbe et al., 2021): grade-school arithmetic in words, https://huggingface.co/datasets/openai/gsm8k.

The prompt is that of verl's example, so that scores are comparable.
"""

from __future__ import annotations

from mrl.data.public_sets.base import HubFiles, PublicSet, Row, UnusableRowError, text_of, user

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MARK = "####"


def recognizes(row: Row) -> bool:
    """Returns whether a row has a question, and an answer with its result after ####."""
    answer = row.get("answer")
    return isinstance(row.get("question"), str) and isinstance(answer, str) and MARK in answer


def convert(row: Row) -> Row:
    """Returns the prompt, the number after #### without commas, and the column "solution" with the text."""
    solution = text_of(row, "answer")
    answer = solution.rpartition(MARK)[2].strip().replace(",", "")
    if MARK not in solution or not answer:
        raise UnusableRowError(f"no result after {MARK} in column answer")
    return {
        "prompt": user(f"{text_of(row, 'question')} {INSTRUCTION}"),
        "answer": answer,
        "data_source": "openai/gsm8k",
        "solution": solution,
    }


DATA_SET = PublicSet(
    description="grade-school arithmetic in words: 7,473 training and 1,319 held-out questions",
    train=(HubFiles("hf://datasets/openai/gsm8k/main/train-*.parquet"),),
    val=(HubFiles("hf://datasets/openai/gsm8k/main/test-*.parquet"),),
    recognizes=recognizes,
    convert=convert,
    reward={"name": "numeric"},
    prompt_length=512,
    response_length=1024,
    consumed=("question", "answer"),
)
