"""What a chat template is told of a tool: a JSON schema from a function's type hints and docstring.

The same as transformers' `get_json_schema`, which imports torch: a worker starts in the time that Python takes.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mrl.environments.base import Schema, Tool
from mrl.errors import UserError

_SECTION = re.compile(r"^\s*(Args|Returns|Raises):\s*$")
_ARGUMENT = re.compile(r"^([ \t]*)(\w+):\s*(.*)$")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_CONTAINERS = {list: "array", tuple: "array", dict: "object"}


def schema_of(tool: Tool | Schema) -> Schema:
    """The schema of a function, or the schema itself.

    Raises:
        UserError: The function lacks a docstring, a type hint or an argument's description, or a hint has no JSON type.
    """
    if isinstance(tool, Mapping):
        if not isinstance(tool.get("function"), Mapping) or not isinstance(tool["function"].get("name"), str):
            raise UserError(
                f"a tool is {json.dumps(tool, default=repr)[:200]}, expected a function, or a schema "
                "{'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': ...}}."
            )
        return dict(tool)
    name = tool_name(tool)
    description, told = _docstring(inspect.getdoc(tool) or "")
    if not description:
        raise UserError(f"tool '{name}' has no docstring: its first lines tell the model what it does.")
    hints = get_type_hints(tool)
    properties, required = {}, []
    for argument, parameter in inspect.signature(tool).parameters.items():
        if argument not in hints:
            raise UserError(f"tool '{name}': its argument '{argument}' has no type hint.")
        if argument not in told:
            raise UserError(f"tool '{name}': its docstring does not describe '{argument}' under 'Args:'.")
        properties[argument] = _property(name, argument, hints[argument], told[argument])
        if parameter.default is inspect.Parameter.empty:
            required.append(argument)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def tool_name(tool: Tool | Schema) -> str:
    """How the model calls it."""
    return str(tool["function"]["name"]) if isinstance(tool, Mapping) else getattr(tool, "__name__", "operation")


def _property(name: str, argument: str, hint: Any, told: str) -> dict[str, Any]:
    found = _json_type(hint, f"tool '{name}': its argument '{argument}'")
    if choices := _CHOICES.search(told):
        try:
            found["enum"] = [str(choice).strip() for choice in json.loads(choices[1])]
        except ValueError as error:
            raise UserError(f"tool '{name}': the choices of '{argument}' are no JSON list: {choices[1]}.") from error
        told = told[: choices.start()].strip()
    return {**found, "description": told}


def _json_type(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type hint; UserError names the place where there is none."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choices([member.value for member in hint], where)
    if origin is None and hint in _PLAIN | _CONTAINERS:
        return {"type": (_PLAIN | _CONTAINERS)[hint]}
    if origin is Literal:
        return _choices(list(args), where)
    if origin in (Union, types.UnionType):
        return _union(args, where)
    if origin is list:
        return {"type": "array", "items": _json_type(args[0], where)}
    if origin is tuple and len(args) > 1 and ... not in args:
        return {"type": "array", "prefixItems": [_json_type(item, where) for item in args]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _json_type(args[1], where)}
    raise UserError(
        f"{where} has the type {hint!r}; expected int, float, str, bool, Literal, an Enum, or list, tuple[...], dict "
        "and unions of them."
    )


def _union(args: tuple[Any, ...], where: str) -> dict[str, Any]:
    kinds = [_json_type(item, where) for item in args if item is not type(None)]
    if len(kinds) == 1:
        found = kinds[0]
    elif all(kind.keys() == {"type"} and isinstance(kind["type"], str) for kind in kinds):
        names = sorted({kind["type"] for kind in kinds})
        found = {"type": names[0] if len(names) == 1 else names}
    else:
        found = {"anyOf": kinds}
    return {**found, "nullable": True} if type(None) in args else found


def _choices(values: list[Any], where: str) -> dict[str, Any]:
    if not values or any(type(value) not in _PLAIN for value in values):
        raise UserError(f"{where} may be one of {values}, expected numbers, texts, True, False or None.")
    kinds = list(dict.fromkeys(_PLAIN[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What stands above the sections, and the description of each argument."""
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            current = heading[1]
        sections.setdefault(current, []).append("" if heading else line)
    return "\n".join(sections[""]).strip(), _arguments(sections.get("Args", []))


def _arguments(lines: list[str]) -> dict[str, str]:
    """Name -> description; what is indented deeper than the first name goes on with the description before it."""
    told: dict[str, list[str]] = {}
    indent, name = None, ""
    for line in lines:
        found = _ARGUMENT.match(line)
        if found and (indent is None or len(found[1]) <= indent):
            indent, name = len(found[1]), found[2]
            told[name] = [found[3].strip()]
        elif name and line.strip():
            told[name].append(line.strip())
    return {name: " ".join(part for part in parts if part) for name, parts in told.items()}
