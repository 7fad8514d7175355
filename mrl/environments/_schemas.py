"""JSON schemas of tools for chat templates, from a function's type hints and docstring.

Equals transformers' `get_json_schema`, which imports torch and would slow down the start of workers.
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
    """Returns the schema of a function; a mapping is returned as it is, after a check.

    Raises:
        UserError: A docstring, a type hint or an argument's description is missing, or a hint has no JSON type.
    """
    if isinstance(tool, Mapping):
        if not isinstance(tool.get("function"), Mapping) or not isinstance(tool["function"].get("name"), str):
            raise UserError(
                f"a tool is {json.dumps(tool, default=repr)[:200]}, expected a function, or a schema "
                "{'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': ...}}."
            )
        return dict(tool)
    name = tool_name(tool)
    description, documented = _docstring(inspect.getdoc(tool) or "")
    if not description:
        raise UserError(f"tool '{name}' has no docstring. Add one: it describes the tool to the model.")
    hints = get_type_hints(tool)
    properties, required = {}, []
    for argument, parameter in inspect.signature(tool).parameters.items():
        if argument not in hints:
            raise UserError(f"tool '{name}': its argument '{argument}' has no type hint.")
        if argument not in documented:
            raise UserError(f"tool '{name}': its docstring does not describe '{argument}' under 'Args:'.")
        properties[argument] = _property(name, argument, hints[argument], documented[argument])
        if parameter.default is inspect.Parameter.empty:
            required.append(argument)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def tool_name(tool: Tool | Schema) -> str:
    """Returns the name by which the model calls a tool."""
    return str(tool["function"]["name"]) if isinstance(tool, Mapping) else getattr(tool, "__name__", "operation")


def _property(name: str, argument: str, hint: Any, description: str) -> dict[str, Any]:
    found = _json_type(hint, f"tool '{name}': its argument '{argument}'")
    if choices := _CHOICES.search(description):
        try:
            found["enum"] = [str(choice).strip() for choice in json.loads(choices[1])]
        except ValueError as error:
            raise UserError(f"tool '{name}': the choices of '{argument}' are not a JSON list: {choices[1]}.") from error
        description = description[: choices.start()].strip()
    return {**found, "description": description}


def _json_type(hint: Any, where: str) -> dict[str, Any]:
    """Returns the JSON schema of a type hint; raises UserError, prefixed with `where`, for other types."""
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
    """Returns the text above the first section, and the description of each argument."""
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            current = heading[1]
        sections.setdefault(current, []).append("" if heading else line)
    return "\n".join(sections[""]).strip(), _arguments(sections.get("Args", []))


def _arguments(lines: list[str]) -> dict[str, str]:
    """Parses name -> description; lines indented deeper than the first name continue the previous description."""
    described: dict[str, list[str]] = {}
    indent, name = None, ""
    for line in lines:
        found = _ARGUMENT.match(line)
        if found and (indent is None or len(found[1]) <= indent):
            indent, name = len(found[1]), found[2]
            described[name] = [found[3].strip()]
        elif name and line.strip():
            described[name].append(line.strip())
    return {name: " ".join(part for part in parts if part) for name, parts in described.items()}
