"""What a field of Megatron's may be set to, by its annotation.

Owns the names that stand for values which are no text: members of Megatron's enums, and torch's types. How annotations
are read is in `config/foreign_types.py`; the values themselves are made in `megatron/config_passthrough.py`.
"""

from __future__ import annotations

from collections.abc import Collection

from mrl.config import foreign_types
from mrl.config.megatron_fields.installed import enum_members

DTYPES = {
    "float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "uint8": "uint8",
    "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8",
}  # fmt: skip
"""How a torch.dtype may be written, torch's names and Megatron's -> torch's."""

DTYPE = "torch.dtype"


def fits(kind: str, value: object) -> bool:
    """Whether a field with this annotation takes the value as YAML gives it."""
    return foreign_types.fits(kind, value, _names)


def expected(kind: str) -> str:
    """What a field with this annotation takes, in words; "" where nothing that YAML can say."""
    return foreign_types.expected(kind, _names)


def names_dtype(kind: str) -> bool:
    """Whether the value is a torch.dtype's name."""
    return DTYPE in foreign_types.choices(kind)


def enum_of(kind: str) -> str | None:
    """The enum whose members the values are, if it is one."""
    return next((name for name in foreign_types.choices(kind) if enum_members(name)), None)


def _names(kind: str) -> Collection[str]:
    return DTYPES if kind == DTYPE else enum_members(kind)
