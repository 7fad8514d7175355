"""Arguments that a verl run hands to TensorRT-LLM, as `rollout.engine_kwargs`.

Owns which of them mrl hands on too, and what is said of the others.
"""

from __future__ import annotations

from typing import Any

from mrl.engines.trtllm import llm_fields
from mrl.from_verl.line import Settings
from mrl.peers.verl_keys import ENGINE_ARGUMENTS, ROLLOUT


def engine_arguments(given: Settings, decided: dict[str, str], refused: dict[str, str]) -> dict[str, Any] | None:
    """`rollout.engine_kwargs`; None where nothing is handed on.

    Args:
        given: verl's dotted keys.
        decided: Gets those that need no counterpart, with what decides them.
        refused: Gets those that have none, with the reason.
    """
    found: dict[str, Any] = {}
    for key, value in given.items():
        if not key.startswith(ENGINE_ARGUMENTS):
            continue
        path = key.removeprefix(ENGINE_ARGUMENTS)
        what = _verdict(path)
        if given.get(f"{ROLLOUT}name") != "trtllm":
            decided[key] = "arguments of an engine that is not the run's"
        elif what is None:
            refused[key] = f"TensorRT-LLM {llm_fields.VERSION} has no such argument"
        elif what.kind == "free":
            _put(found, path.split("."), value)
        else:
            (decided if what.kind == "derived" else refused)[key] = what.why
    return {"trtllm": found} if found else None


def _verdict(path: str) -> llm_fields.Verdict | None:
    """Of an argument; what is inside one that takes a mapping of TensorRT-LLM's goes with it."""
    name, _, inner = path.partition(".")
    return llm_fields.TABLE.get(name if inner and name not in llm_fields.SECTIONS else path)


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value
