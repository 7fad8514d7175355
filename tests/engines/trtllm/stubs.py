"""Writes stub files (.pyi) of tensorrt_llm and tensorrt from `signatures.json`: `python -m tests.engines.trtllm.stubs`.

Owns that translation, for mypy. Both flavours are in them; mypy finds them by mypy_path in .mypy.ini.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.engines.trtllm.signature import signatures

FOLDER = Path(__file__).with_name("typings")
FOREIGN = {
    "Any": "typing", "Callable": "collections.abc", "AbstractContextManager": "contextlib", "Enum": "enum",
    "StrEnum": "enum", "Tensor": "torch", "Module": "torch.nn", "Stream": "torch.cuda", "Thread": "threading",
    "ndarray": "numpy", "Queue": "queue",
}  # fmt: skip
"""Names of annotations that come from elsewhere."""


def stub_files() -> dict[str, str]:
    """Path under the folder -> text."""
    entries = signatures()
    classes = {name for name, item in entries.items() if item["type"] in ("class", "enum")}
    homes = {name.rpartition(".")[2]: name.rpartition(".")[0] for name in sorted(classes)}
    modules: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    members: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for name, item in entries.items():
        owner, _, own = name.rpartition(".")
        (members if owner in classes else modules)[owner][own] = item
    for module in list(modules):
        for depth in range(1, module.count(".") + 1):
            modules.setdefault(module.rsplit(".", depth)[0], {})
    return {
        _path(module, modules): _module(module, content, modules, members, homes)
        for module, content in sorted(modules.items())
    }


def _path(module: str, modules: dict[str, Any]) -> str:
    package = any(other.startswith(module + ".") for other in modules)
    return module.replace(".", "/") + ("/__init__.pyi" if package else ".pyi")


def _module(
    module: str, content: dict[str, Any], modules: dict[str, Any], members: dict[str, Any], homes: dict[str, str]
) -> str:
    body = []
    for own, item in content.items():
        if item["type"] == "alias":
            home, _, name = item["alias_of"].rpartition(".")
            body.append(f"from {home} import {name} as {own}")
        elif item["type"] == "attribute":
            body.append(f"{own}: {item['annotation']}")
        elif item["type"] == "function":
            body.append(_function(own, item, method=False))
        else:
            body.append(_class(own, item, members[f"{module}.{own}"]))
    text = _short("\n".join(body), module)
    used = set(re.findall(r"\b[A-Za-z_]\w*\b", text))
    imports = [f"from {home} import {name}" for name, home in FOREIGN.items() if name in used]
    imports += [
        f"from {home} import {name}"
        for name, home in homes.items()
        if name in used and home != module and f"import {name} as {name}" not in text and name not in content
    ]
    return (
        "# Written by tests/engines/trtllm/stubs.py from signatures.json.\n"
        + "\n".join([*sorted(imports), text])
        + "\n"
    )


def _short(text: str, module: str) -> str:
    """Dotted annotations by their last part; imports stay as they are."""
    lines = [
        line
        if line.startswith("from ")
        else re.sub(r"\b(?:tensorrt|tensorrt_llm)(?:\.\w+)+", lambda found: found[0].rpartition(".")[2], line)
        for line in text.splitlines()
    ]
    return "\n".join(lines)


def _class(own: str, item: dict[str, Any], members: dict[str, Any]) -> str:
    if item["type"] == "enum":
        strings = all(param["default"].startswith("'") for param in item["params"])
        lines = [f"class {own}({'StrEnum' if strings else 'Enum'}):"]
        return "\n".join([*lines, *(f"    {param['name']} = {param['default']}" for param in item["params"])])
    bases = ", ".join(item.get("bases", ()))
    lines = [f"class {own}({bases}):" if bases else f"class {own}:"]
    fields = [param for param in item["params"] if param["kind"] == "FIELD"]
    lines += [f"    {param['name']}: {_annotation(param)}" for param in fields]
    if fields and "__init__" not in members:
        given = ", ".join(
            f"{param.get('alias', param['name'])}: {_annotation(param)}{' = ...' if 'default' in param else ''}"
            for param in sorted(fields, key=lambda param: "default" in param)
        )
        lines.append(f"    def __init__(self, *, {given}) -> None: ...")
    for name, member in members.items():
        if member["type"] == "attribute":
            lines.append(f"    {name}: {member['annotation']}")
        else:
            lines.append(_function(name, member, method=True))
    return "\n".join([*lines, "    ..."] if len(lines) == 1 else lines)


def _function(own: str, item: dict[str, Any], *, method: bool) -> str:
    decorators = [name for name in item.get("decorators", ()) if name in ("staticmethod", "classmethod", "property")]
    parts = [] if not method or "staticmethod" in decorators else ["cls" if "classmethod" in decorators else "self"]
    marked = False
    for param in item["params"]:
        if param["name"] in ("cls", "self") and method:
            continue
        if param["kind"] == "KEYWORD_ONLY" and not marked:
            parts.append("*")
            marked = True
        star = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(param["kind"], "")
        marked = marked or star == "*"
        default = " = ..." if "default" in param and not star else ""
        parts.append(f"{star}{param['name']}: {_annotation(param)}{default}")
    indent = "    " if method else ""
    lines = [f"{indent}@{name}" for name in decorators]
    return "\n".join([*lines, f"{indent}def {own}({', '.join(parts)}) -> {item.get('returns', 'Any')}: ..."])


def _annotation(param: dict[str, Any]) -> str:
    return str(param.get("annotation", "Any"))


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    for path, text in stub_files().items():
        (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / path).write_text(text, encoding="utf-8")
