"""APPS (Hendrycks et al., 2021): programming problems with tests, https://huggingface.co/datasets/codeparrot/apps.

`taco` has the same columns. `fn_name` in the tests names a function to call; without it a program reads standard input.
"""

from __future__ import annotations

import json
from typing import Any

from mrl.data.public_sets.base import HubFiles, PublicSet, Row, UnusableRowError, json_of, rest_of, text_of, user

STANDARD_INPUT = "Write a Python program that reads standard input and writes to standard output."
FUNCTION = "Write a Python function `{name}`, or a class `Solution` with it as a method."
BLOCK = "Put the complete program in one ```python block."


def recognizes(row: Row) -> bool:
    """Returns whether a row has a question, and tests in the column input_output."""
    return isinstance(row.get("question"), str) and "input_output" in row


def convert(row: Row) -> Row:
    """Returns the prompt, and the tests as JSON that the reward `code` reads."""
    return {
        **code_row(text_of(row, "question"), row.get("starter_code"), tests_of(row)),
        "data_source": "taco" if "skill_types" in row else "apps",
        **rest_of(row, "difficulty", "url"),
    }


def code_row(question: str, starter: Any, tests: dict[str, Any]) -> Row:
    """Returns the prompt and the answer of a programming problem.

    Args:
        question: Problem statement.
        starter: Code to complete; a blank text or None for none.
        tests: "inputs" and "outputs" of equal length, and "fn_name" where a function is called.
    """
    how = FUNCTION.format(name=tests["fn_name"]) if "fn_name" in tests else STANDARD_INPUT
    begin = f"\n\nStart from this code:\n```python\n{starter.strip()}\n```" if _has_text(starter) else ""
    return {
        "prompt": user(f"{question.strip()}{begin}\n\n{how} {BLOCK}"),
        "answer": json.dumps(tests, ensure_ascii=False),
    }


def tests_of(row: Row) -> dict[str, Any]:
    """Returns "inputs", "outputs" and possibly "fn_name" of the column input_output.

    Raises:
        UnusableRowError: There are no tests, or not as many outputs as inputs.
    """
    tests = json_of(row, "input_output")
    match tests:
        case {"inputs": [*inputs], "outputs": [*outputs]} if len(inputs) == len(outputs) > 0:
            name = tests.get("fn_name")
            return {"inputs": inputs, "outputs": outputs, **({"fn_name": name} if _has_text(name) else {})}
    raise UnusableRowError("no tests in column input_output")


def _has_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


DATA_SET = PublicSet(
    description="programming problems with tests: 5,000 for training, 5,000 held out",
    train=(HubFiles("hf://datasets/codeparrot/apps/train.jsonl", "apps"),),
    val=(HubFiles("hf://datasets/codeparrot/apps/test.jsonl", "apps"),),
    recognizes=recognizes,
    convert=convert,
    reward={"name": "code"},
    prompt_length=2048,
    response_length=4096,
    consumed=("question", "starter_code", "input_output", "solutions"),
)
