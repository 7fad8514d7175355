"""Value types of Megatron's fields, from their annotations.

Adds the names of enum members and torch dtypes to `config/type_annotations.py`; `megatron/config_passthrough.py`
constructs the values.
"""

from __future__ import annotations

from collections.abc import Collection

from mrl.config import type_annotations
from mrl.config.megatron_fields.installed import enum_members

DTYPES = {
    "float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "uint8": "uint8",
    "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8",
}  # fmt: skip
"""Accepted spelling of a torch.dtype (torch's or Megatron's name) -> torch's name."""

DTYPE = "torch.dtype"


def fits(kind: str, value: object) -> bool:
    """Returns whether a field with this annotation accepts a YAML value."""
    return type_annotations.fits(kind, value, _names)


def expected(kind: str) -> str:
    """Returns a description of the values that an annotation accepts; "" if YAML cannot express any."""
    return type_annotations.expected(kind, _names)


def names_dtype(kind: str) -> bool:
    """Returns whether the value is the name of a torch.dtype."""
    return DTYPE in type_annotations.choices(kind)


def enum_of(kind: str) -> str | None:
    """Returns the name of the enum that the annotation names; None if it names none."""
    return next((name for name in type_annotations.choices(kind) if enum_members(name)), None)


def _names(kind: str) -> Collection[str]:
    return DTYPES if kind == DTYPE else enum_members(kind)
