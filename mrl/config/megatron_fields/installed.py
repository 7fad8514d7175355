"""The fields of the installed Megatron's configuration classes, read from its files: nothing of it is imported.

Owns where each class lies and how its fields are read. What a field means to mrl is in `table.py`.
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
"""Section of `megatron` -> the class that it fills, its bases first."""

ENUMS = "transformer/enums.py"


class Unreadable:
    """Stands for a default that is no literal."""


UNREADABLE = Unreadable()


@dataclass(frozen=True)
class Field:
    """A field of a class.

    Attributes:
        kind: Its annotation, as Python text.
        default: Of the class: members of an enum and torch's types by their name; UNREADABLE where it is computed.
    """

    name: str
    kind: str
    default: Any


@functools.cache
def fields_of(section: str) -> dict[str, Field]:
    """Every field of the class that a section of `megatron` fills, by name.

    Raises:
        UserError: Megatron is not installed, or its files are not those of a version that mrl runs with.
    """
    found: dict[str, Field] = {}
    for file, name in CLASSES[section]:
        found |= {item.name: item for item in _fields(_class(file, name))}
    return found


@functools.cache
def enum_members(name: str) -> tuple[str, ...]:
    """Names of the members of one of Megatron's enums; () where there is no such enum."""
    for node in _tree(ENUMS).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            targets = [item.targets[0] for item in node.body if isinstance(item, ast.Assign)]
            return tuple(target.id for target in targets if isinstance(target, ast.Name))
    return ()


def version() -> str:
    """Of the installed Megatron; "" where there is none."""
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
    """What a field without a value has; `field(default=..)` too."""
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
        f"the installed megatron-core {version()} has no {name} in {file}: mrl does not run with this version. Install "
        "the one that setup.py asks for."
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
        spec = importlib.util.find_spec(PACKAGE)  # imports the namespace above it, which is empty
    except ModuleNotFoundError:
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise UserError("megatron-core is not installed: `megatron` cannot be checked. pip install megatron-core")
    return Path(places[0])
