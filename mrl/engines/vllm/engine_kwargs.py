"""`rollout.engine_kwargs.vllm`: which arguments are passed on to vLLM's `LLM`, and their merging with mrl's.

The argument names are in `engine_fields.py`. Values are checked by vLLM when the engine starts. Imports vLLM only in
`merge_arguments`, and never torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

from mrl.config.config import RolloutConfig
from mrl.config.did_you_mean import did_you_mean
from mrl.engines.vllm.engine_fields import INSTALL, NAMES, REFUSED, VERSION
from mrl.engines.vllm.package_signature import installed, is_supported
from mrl.errors import UserError

ENGINE = "vllm"
KEY = f"rollout.engine_kwargs.{ENGINE}"
EXAMPLE = "{attention_backend: FLASH_ATTN}"


def user_arguments(rollout: RolloutConfig) -> dict[str, Any]:
    """Returns the arguments to pass on; {} if there are none."""
    found = rollout.engine_kwargs.get(ENGINE)
    return dict(found) if isinstance(found, Mapping) else {}


def refusals(rollout: RolloutConfig) -> Iterator[str]:
    """Yields a message for each argument that is not passed on."""
    for name in map(str, user_arguments(rollout)):
        if name in REFUSED:
            yield f"{KEY}.{name} is refused: {REFUSED[name]}."
        elif name not in NAMES and _are_all(installed()):
            yield _unknown(name, NAMES, VERSION)


def _are_all(version: str | None) -> bool:
    """Returns whether `NAMES` lists all arguments of this version; None (not installed) counts as `VERSION`."""
    return version is None or is_supported(version)


def merge_arguments(derived: Mapping[str, Any], given: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Returns the arguments of `LLM`: those that mrl derives from `rollout`, and those passed on.

    Args:
        derived: Arguments that mrl sets.
        given: `rollout.engine_kwargs.vllm`, already checked by `refusals`.
        version: Version of the installed vLLM, for messages.

    Raises:
        UserError: The installed version has no such argument.
    """
    from vllm.engine.arg_utils import EngineArgs

    known = {item.name for item in fields(EngineArgs)}
    for name in given:
        if name not in known:
            raise UserError(_unknown(name, known, version))
    lacking = derived.keys() - known
    if lacking:
        raise UserError(f"vLLM {version} has no argument {', '.join(sorted(lacking))}, which mrl needs. {INSTALL}")
    return {**derived, **given}


def _unknown(name: str, known: Collection[str], version: str) -> str:
    return (
        f"{KEY}.{name} is unknown to vLLM {version}."
        f"{did_you_mean(name, known) or ' Look its arguments up in the documentation of EngineArgs.'}"
    )
