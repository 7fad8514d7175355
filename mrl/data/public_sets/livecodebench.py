"""LiveCodeBench (Jain et al., 2024): recent contest problems, for evaluation only.

The rows come from https://huggingface.co/datasets/livecodebench/code_generation_lite. Their private tests are a pickled
text. It is read without an unpickler: `read_pickled_text` accepts a text and nothing else.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from typing import Any

from mrl.data.public_sets.apps import code_row
from mrl.data.public_sets.base import HubFiles, PublicSet, Row, UnusableRowError, json_of, rest_of, text_of

MAX_TEXT_BYTES = 1 << 30
"""Limit on the uncompressed size of a row's private tests."""

_TEXT = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_HARMLESS = ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP")


def recognizes(row: Row) -> bool:
    """Returns whether a row has a problem statement and public tests."""
    return isinstance(row.get("question_content"), str) and "public_test_cases" in row


def convert(row: Row) -> Row:
    """Returns the prompt, and the public and private tests as JSON that the reward `code` reads."""
    return {
        **code_row(text_of(row, "question_content"), row.get("starter_code"), _tests(row)),
        "data_source": "livecodebench",
        **rest_of(row, "question_id", "contest_date", "platform", "difficulty"),
    }


def _tests(row: Row) -> dict[str, Any]:
    cases = [*_cases(json_of(row, "public_test_cases")), *_cases(_private(row.get("private_test_cases")))]
    if not cases:
        raise UnusableRowError("no tests")
    if all(case.get("testtype") != "functional" for case in cases):
        return {"inputs": [case["input"] for case in cases], "outputs": [case["output"] for case in cases]}
    metadata = json_of(row, "metadata")
    name = metadata.get("func_name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        raise UnusableRowError("its tests call a function that column metadata does not name")
    try:
        # One argument per line; the output is the value itself.
        inputs = [[json.loads(line) for line in case["input"].splitlines() if line.strip()] for case in cases]
        outputs = [[json.loads(case["output"])] for case in cases]
    except ValueError as error:
        raise UnusableRowError("the arguments of its tests are not JSON") from error
    return {"inputs": inputs, "outputs": outputs, "fn_name": name}


def _cases(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not all(
        isinstance(one, dict) and isinstance(one.get("input"), str) and isinstance(one.get("output"), str)
        for one in value
    ):
        raise UnusableRowError("its tests are not a list of inputs and outputs")
    return value


def _private(value: Any) -> Any:
    """Returns the private tests: JSON text, or base64 of the compressed pickle of JSON text."""
    if value is None or value == "":
        return []
    if not isinstance(value, str):
        raise UnusableRowError("column private_test_cases holds no text")
    try:
        return json.loads(value)
    except ValueError:
        pass
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(base64.b64decode(value, validate=True), MAX_TEXT_BYTES)
        if not unpacker.eof:
            raise UnusableRowError("column private_test_cases is truncated or too large")
        return json.loads(read_pickled_text(content))
    except (ValueError, binascii.Error, zlib.error) as error:
        if isinstance(error, UnusableRowError):
            raise
        raise UnusableRowError("column private_test_cases cannot be decoded") from error


def read_pickled_text(content: bytes) -> str:
    """Returns the text in a pickle that contains one text and nothing else. Runs none of the pickle's instructions.

    Raises:
        ValueError: The pickle contains something else, or is damaged.
    """
    texts = []
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in _TEXT and isinstance(argument, str):
            texts.append(argument)
        elif operation.name not in _HARMLESS:
            raise ValueError(f"the pickle has the instruction {operation.name}, expected one text")
    if len(texts) != 1:
        raise ValueError(f"the pickle has {len(texts)} texts, expected one")
    return texts[0]


DATA_SET = PublicSet(
    description="recent contest problems: about 1,000, all held out, no training questions",
    train=(),
    val=(HubFiles("hf://datasets/livecodebench/code_generation_lite/test*.jsonl", "livecodebench"),),
    recognizes=recognizes,
    convert=convert,
    reward={"name": "code"},
    prompt_length=2048,
    response_length=8192,
    consumed=("question_content", "starter_code", "public_test_cases", "private_test_cases", "metadata"),
)
