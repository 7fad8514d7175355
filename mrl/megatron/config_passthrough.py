"""Passing values of the config section `megatron` to Megatron's classes.

YAML values become the objects that Megatron expects, and Megatron's errors are reported with the keys that were given.
`trainer/validation/megatron.py` knows which fields may be given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer import enums

from mrl.config.megatron_fields.installed import fields_of
from mrl.config.megatron_fields.table import te_only
from mrl.config.megatron_fields.values import DTYPES, enum_of, names_dtype
from mrl.errors import UserError, first_line, out_of_memory, to_install

REFUSALS = (ValueError, AssertionError, ImportError, RuntimeError, NotImplementedError, TypeError)
"""Errors that Megatron raises for a configuration that it does not support."""


def megatron_values(section: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the given fields of a section for Megatron: names become torch dtypes and enum members."""
    known = fields_of(section)
    return {name: _megatron_value(known[name].kind, value) for name, value in given.items()}


@contextmanager
def explain_errors(section: str, given: Iterable[str]) -> Iterator[None]:
    """Converts errors of Megatron inside into UserErrors that name the given keys; does nothing without keys.

    Raises:
        UserError: Megatron rejected the configuration.
    """
    names = [f"megatron.{section}.{name}" for name in given]
    try:
        yield
    except UserError:
        raise
    except REFUSALS as error:
        if not names or out_of_memory(error) or not _raised_in_megatron(error):
            raise
        refusal = UserError(
            f"Megatron rejects this configuration: {first_line(error).rstrip('.')}. The config sets "
            f"{', '.join(names)}: change or remove the fields that Megatron names, or add those that it asks for."
        )
        refusal.on_all_ranks = True
        raise refusal from error


def check_te(section: str, given: Iterable[str], *, te: bool) -> None:
    """Rejects fields that only TransformerEngine supports if it is not used.

    Raises:
        UserError: Such fields are given; they are listed.
    """
    names = [f"megatron.{section}.{name}" for name in given if te_only(section, name)]
    if names and not te:
        refusal = UserError(
            f"{', '.join(names)} needs TransformerEngine, which is not in use. Remove it on a CPU; on a GPU install "
            f"TransformerEngine ({to_install('gpu')}; see README)."
        )
        refusal.on_all_ranks = True
        raise refusal


def _raised_in_megatron(error: BaseException) -> bool:
    """Returns whether the error was raised in Megatron's own code, and not in torch (lost rank, out of memory)."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and "/megatron/core/" in frame.tb_frame.f_code.co_filename.replace("\\", "/")


def _megatron_value(kind: str, value: Any) -> Any:
    if isinstance(value, str) and names_dtype(kind):
        return getattr(torch, DTYPES[value])
    if isinstance(value, str) and (name := enum_of(kind)):
        members = getattr(enums, name).__members__
        return members.get(value, value)
    return tuple(value) if isinstance(value, list) and "Tuple" in kind else value
