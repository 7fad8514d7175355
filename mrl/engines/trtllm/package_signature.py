"""Fields and accepted values of the installed TensorRT-LLM, parsed from its source file without importing it.

Importing the package communicates with all ranks of an MPI job, which is not possible before a job starts.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

from mrl.engines.trtllm.llm_fields import SECTIONS

PACKAGE = "tensorrt_llm"
FILE = Path("llmapi", "llm_args.py")
CLASS = "TorchLlmArgs"


def is_installed() -> bool:
    """Returns whether TensorRT-LLM is installed, so that the engine's start checks against it."""
    return importlib.util.find_spec(PACKAGE) is not None


def accepted_strings(path: str) -> tuple[str, ...]:
    """Returns the strings that `field` or `section.field` of the installed `LLM` accepts; () if they are not listed."""
    classes = _installed_classes()
    section, _, field = path.rpartition(".")
    node = _annotation(classes, SECTIONS.get(section, CLASS), field)
    return () if node is None else tuple(dict.fromkeys(_texts(classes, node)))


def lacks(field: str) -> bool:
    """Returns whether the installed version's file lists the fields of `LLM` and this field is not among them."""
    classes = _installed_classes()
    spelled = any(isinstance(item, ast.AnnAssign) for item in classes[CLASS].body) if CLASS in classes else False
    return spelled and _annotation(classes, CLASS, field) is None


def _installed_classes() -> dict[str, ast.ClassDef]:
    spec = importlib.util.find_spec(PACKAGE)
    return _classes(Path(spec.origin).parent / FILE) if spec is not None and spec.origin else {}


@functools.cache
def _classes(file: Path) -> dict[str, ast.ClassDef]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _annotation(classes: dict[str, ast.ClassDef], name: str, field: str) -> ast.expr | None:
    """Returns the annotation of a field in a class, or in its bases in the same file."""
    if name not in classes:
        return None
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == field:
            return node.annotation
    bases = (_annotation(classes, ast.unparse(base), field) for base in classes[name].bases)
    return next((found for found in bases if found is not None), None)


def _texts(classes: dict[str, ast.ClassDef], annotation: ast.expr) -> list[str]:
    """Returns the strings of every `Literal` in an annotation, and of the members of every enumeration."""
    found: list[str] = []
    for node in ast.walk(annotation):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] == "Literal":
            found += [item.value for item in ast.walk(node.slice) if _is_text(item)]  # type: ignore[attr-defined]
        elif isinstance(node, ast.Name) and _is_enumeration(classes.get(node.id)):
            members = (item.value for item in classes[node.id].body if isinstance(item, ast.Assign))
            found += [item.value for item in members if _is_text(item)]  # type: ignore[attr-defined]
    return found


def _is_enumeration(node: ast.ClassDef | None) -> bool:
    return node is not None and any(ast.unparse(base).endswith("Enum") for base in node.bases)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
