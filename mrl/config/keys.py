"""Dotted keys of a schema of dataclasses: lists them, and flattens nested values into them.

Unknown keys are refused with a suggestion. Value types are checked by `config.load`, ranges and rules between keys by
`trainer/validation/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from mrl.config.did_you_mean import nearest
from mrl.config.verl_keys.foreign_names import key_hint
from mrl.errors import Mistakes, UserError

NEAR = 0.75
"""Similarity threshold for keys, higher than `did_you_mean.NEAR`: hundreds of keys are half similar to each other."""


def dotted_keys(schema: type, prefix: str = "") -> dict[str, Any]:
    """Returns every dotted key of the schema with its type, in order; sections are expanded, lists of sections not."""
    keys: dict[str, Any] = {}
    for name, kind in _members(schema).items():
        if is_dataclass(kind):
            keys |= dotted_keys(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            keys[f"{prefix}{name}"] = kind
    return keys


def nested(key: str, value: Any) -> Any:
    """Returns a value as nested dicts under a dotted key: `a.b[0].c` -> {"a": {"b": {0: {"c": value}}}}."""
    for part in reversed(re.findall(r"[^.\[\]]+", key)):
        value = {int(part) if part.isdecimal() else part: value}
    return value


def is_key(key: str, schema: type) -> bool:
    """Returns whether a dotted key names a field or section of the schema, not an entry of a list or mapping."""
    return any(known == key or known.startswith(f"{key}.") for known in dotted_keys(schema))


def leaves(raw: Any, schema: type, mistakes: Mistakes | None = None) -> list[tuple[str, Any, Any]]:
    """Returns the dotted key, value and type of every field that `raw` (nested dicts and lists) sets.

    A list of sections yields the list with empty sections first, then its fields.

    Args:
        raw: Nested dicts and lists.
        schema: Dataclass.
        mistakes: Receives the errors instead, and what they are about is left out; None: raise them.

    Raises:
        UserError: Keys are unknown (the message suggests the nearest ones), or sections are not mappings.
    """
    own = Mistakes() if mistakes is None else mistakes
    found = list(_walk(raw, schema, "", schema, own))
    if mistakes is None:
        own.check()
    return found


def _walk(raw: Any, kind: Any, path: str, schema: type, mistakes: Mistakes) -> Iterator[tuple[str, Any, Any]]:
    if is_dataclass(kind):
        yield from _section(raw, _members(kind), path, schema, mistakes)
    elif get_origin(kind) is list and is_dataclass(item := get_args(kind)[0]) and isinstance(raw, (list, dict)):
        if isinstance(raw, list):
            yield path, [{} for _ in raw], kind
        for index, value in enumerate(raw) if isinstance(raw, list) else raw.items():
            yield from _section(value, _members(item), f"{path}[{index}]", schema, mistakes)
    else:
        yield path, raw, kind


def _section(
    raw: Any, known: dict[str, Any], path: str, schema: type, mistakes: Mistakes
) -> Iterator[tuple[str, Any, Any]]:
    if not isinstance(raw, dict):
        name = f"config key '{path}'" if path else "the config file"
        found = "is empty" if raw is None else f"is {raw!r}"
        mistakes.add(UserError(f"{name} {found}, expected a section with keys: {', '.join(known)}."))
        return
    for key, value in raw.items():
        full = f"{path}.{key}" if path else str(key)
        if key not in known:
            near = _nearest(str(key), path, list(known), schema)
            where = f"Keys of '{path}'" if path else "Sections"
            own = "" if near and near.rpartition(".")[0] == path else f"{where}: {', '.join(known)}."
            hint = " ".join(filter(None, [f"Did you mean '{near}'?" if near else "", own]))
            mistakes.add(UserError(f"config key '{full}' is unknown. {_foreign(full, value) or hint}"))
        else:
            yield from _walk(value, known[key], full, schema, mistakes)


def _foreign(key: str, value: Any) -> str:
    """Returns the message for a key (or the first one below it) of another trainer; "" if no trainer has it."""
    while isinstance(value, dict) and value:
        inner, value = next(iter(value.items()))
        key = f"{key}.{inner}"
    return key_hint(key)


def _nearest(key: str, path: str, siblings: list[str], schema: type) -> str | None:
    """Returns the known key most similar to `path.key`, preferring its own section, then the same name elsewhere."""
    prefix = f"{path}." if path else ""
    if near := nearest(key, siblings, NEAR):
        return f"{prefix}{near}"
    by_tail: dict[str, str] = {}
    for full in dotted_keys(schema):
        by_tail.setdefault(full.rpartition(".")[2], full)
    near = nearest(key, by_tail, NEAR)
    return by_tail[near] if near else None


def _members(schema: Any) -> dict[str, Any]:
    hints = _hints(schema)
    return {item.name: hints[item.name] for item in fields(schema)}


@cache
def _hints(schema: Any) -> dict[str, Any]:
    return get_type_hints(schema)
