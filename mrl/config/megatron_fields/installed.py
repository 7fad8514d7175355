"""Fields of the installed Megatron's configuration classes, parsed from its source files without importing them.

`table.py` says what mrl does with each field.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.errors import UserError

PACKAGE = "megatron.core"

CLASSES = {
    "transformer": (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ),
    "ddp": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    "optimizer": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}
"""Section of `megatron` -> (file, class) pairs that it fills, base classes first."""

ENUMS = "transformer/enums.py"


class Unreadable:
    """Type of `UNREADABLE`, a default that is not a literal."""


UNREADABLE = Unreadable()


@dataclass(frozen=True)
class Field:
    """A field of a configuration class.

    Attributes:
        name: Megatron's name.
        kind: Annotation as Python text.
        default: Default value; enum members and torch dtypes by their name; UNREADABLE if it is computed.
    """

    name: str
    kind: str
    default: Any


@functools.cache
def fields_of(section: str) -> dict[str, Field]:
    """Returns every field of the class that a section of `megatron` fills, by name.

    Raises:
        UserError: Megatron is not installed, or its files do not match a version that mrl supports.
    """
    found: dict[str, Field] = {}
    for file, name in CLASSES[section]:
        found |= {item.name: item for item in _fields(_class(file, name))}
    return found


@functools.cache
def enum_members(name: str) -> tuple[str, ...]:
    """Returns the member names of one of Megatron's enums; () if there is no such enum."""
    for node in _tree(ENUMS).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            targets = [item.targets[0] for item in node.body if isinstance(item, ast.Assign)]
            return tuple(target.id for target in targets if isinstance(target, ast.Name))
    return ()


def version() -> str:
    """Returns the version of the installed Megatron; "" if there is none."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _fields(node: ast.ClassDef) -> list[Field]:
    return [
        Field(item.target.id, ast.unparse(item.annotation), _default(item.value))
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]


def _default(value: ast.expr | None) -> Any:
    """Returns the default of a field, also in the form `field(default=...)`."""
    if isinstance(value, ast.Call):
        given = {item.arg: item.value for item in value.keywords}
        factory = given.get("default_factory")
        if isinstance(factory, ast.Name) and factory.id == "list":
            return []
        value = given.get("default")
    if isinstance(value, ast.Attribute):  # torch.float32, AttnBackend.auto
        return value.attr
    try:
        return UNREADABLE if value is None else ast.literal_eval(value)
    except ValueError:
        return UNREADABLE


def _class(file: str, name: str) -> ast.ClassDef:
    for node in _tree(file).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise UserError(
        f"the installed megatron-core {version()} has no {name} in {file}: mrl does not support this version. Install "
        "the one that setup.py requires."
    )


@functools.cache
def _tree(file: str) -> ast.Module:
    path = _folder() / file
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise UserError(f"'{path}' of the installed megatron-core {version()} cannot be read: {error}.") from error


@functools.cache
def _folder() -> Path:
    try:
        spec = importlib.util.find_spec(PACKAGE)  # imports only the parent namespace, which is empty
    except ModuleNotFoundError:
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise UserError("megatron-core is not installed: `megatron` cannot be checked. pip install megatron-core")
    return Path(places[0])
