"""JSON Schema of a config, for editors that complete and check YAML (`mrl schema`).

It is generated from the dataclasses of `mrl/config/config.py`. It accepts every config that `config.load` accepts;
types, choices and unknown keys are checked, ranges are only described.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields, is_dataclass
from inspect import getdoc
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mrl.config import registry
from mrl.config.choices import PLUGINS
from mrl.config.config import Config
from mrl.trainer.validation.docs_reference import documentation, range_of

DRAFT = "http://json-schema.org/draft-07/schema#"
"""Version of JSON Schema that the YAML language server implements completely."""

_REFERENCE = {"type": "string", "pattern": r"\$\{.*\}"}
"""A reference to another key, `${run.seed}`, which every field accepts."""

_SCALARS: dict[Any, list[str]] = {
    bool: ["boolean"],
    int: ["integer"],
    float: ["number"],
    str: ["string", "number", "boolean"],  # `load` makes a text of the others
}


def json_schema() -> dict[str, Any]:
    """Returns the schema of a config file."""
    return {"$schema": DRAFT, "title": "Config of mrl", **_section(Config, "")}


def _section(kind: Any, path: str) -> dict[str, Any]:
    """Returns the schema of a dataclass, whose keys are below `path`."""
    hints, lines, properties = get_type_hints(kind), documentation(kind), {}
    for item in fields(kind):
        of_field, key = hints[item.name], f"{path}.{item.name}" if path else item.name
        if is_dataclass(of_field):
            properties[item.name] = _section(of_field, key)
            continue
        allowed = range_of(key)
        described = f"{lines.get(item.name, '')}{f' Range: {allowed}.' if allowed else ''}"
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if isinstance(default, list):
            default = [asdict(each) if is_dataclass(each) else each for each in default]  # type: ignore[arg-type]
        properties[item.name] = {**_field(of_field, key), "description": described, "default": default}
    return {
        "type": "object",
        "description": getdoc(kind) or "",
        "additionalProperties": False,
        "properties": properties,
    }


def _field(kind: Any, key: str) -> dict[str, Any]:
    """Returns the schema of a field's values."""
    accepted = [*_accepted(kind, key), _REFERENCE]
    if key in PLUGINS:
        accepted.insert(0, {"enum": registry.names(PLUGINS[key])})
    return {"anyOf": accepted}


def _accepted(kind: Any, key: str) -> list[dict[str, Any]]:
    """Returns the schemas of a type, of which a value must match one."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Union:
        return [each for part in inside for each in _accepted(part, key)]
    if kind is type(None):
        return [{"type": "null"}]
    if origin is Literal:
        off = [False] if "off" in inside else []  # YAML 1.1 reads `off` as false, and `load` takes it back
        return [{"enum": [*inside, *off]}]
    if origin is dict:
        return [{"type": "object"}]
    if origin is list and is_dataclass(inside[0]):
        return [{"type": "array", "items": _section(inside[0], f"{key}[*]")}]
    if origin is list:
        items = {"type": _SCALARS[inside[0]]}
        return [{"type": "array", "items": items}, items]
    return [{"type": _SCALARS[kind]}]
