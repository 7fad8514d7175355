"""Values of the config section `megatron` on their way into Megatron's classes.

Owns how a YAML value becomes the object that Megatron takes, and that a refusal of Megatron's own is told with the keys
that were given. Which fields may be given is known to `trainer/validation/megatron.py`.
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
"""What Megatron raises over a configuration that it does not take."""


def objects(section: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given fields of a section as Megatron takes them: torch's types and members of enums by their names."""
    known = fields_of(section)
    return {name: _object(known[name].kind, value) for name, value in given.items()}


@contextmanager
def given_to(section: str, given: Iterable[str]) -> Iterator[None]:
    """Inside, what Megatron refuses is told with the keys that were given; without any it is not touched.

    Raises:
        UserError: Megatron refused.
    """
    names = [f"megatron.{section}.{name}" for name in given]
    try:
        yield
    except UserError:
        raise
    except REFUSALS as error:
        if not names or out_of_memory(error) or not _is_megatrons(error):
            raise
        refusal = UserError(
            f"Megatron refuses this configuration: {first_line(error).rstrip('.')}. Given were {', '.join(names)}: add "
            "what Megatron asks for, or change or leave out what it names."
        )
        refusal.everywhere = True
        raise refusal from error


def check_te(section: str, given: Iterable[str], *, te: bool) -> None:
    """Refuses fields that only TransformerEngine has, where it is not in use.

    Raises:
        UserError: With the fields.
    """
    names = [f"megatron.{section}.{name}" for name in given if te_only(section, name)]
    if names and not te:
        refusal = UserError(
            f"TransformerEngine is not in use here, and nothing else has {', '.join(names)}. Leave it out on a CPU; on "
            f"a GPU install TransformerEngine ({to_install('gpu')}; README says how)."
        )
        refusal.everywhere = True
        raise refusal


def _is_megatrons(error: BaseException) -> bool:
    """Whether Megatron's own code raised it: not torch, over a lost rank or a lack of memory."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and "/megatron/core/" in frame.tb_frame.f_code.co_filename.replace("\\", "/")


def _object(kind: str, value: Any) -> Any:
    if isinstance(value, str) and names_dtype(kind):
        return getattr(torch, DTYPES[value])
    if isinstance(value, str) and (name := enum_of(kind)):
        members = getattr(enums, name).__members__
        return members.get(value, value)
    return tuple(value) if isinstance(value, list) and "Tuple" in kind else value
