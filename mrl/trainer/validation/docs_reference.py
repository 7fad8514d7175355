"""Generator of `mrl/docs/config.md`: every field of the config with type, default, range and documentation.

Run `python -m mrl.trainer.validation.docs_reference > mrl/docs/config.md` after a change of `mrl/config/`.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import sys
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from mrl.algorithms.base import ranges
from mrl.config.config import AlgorithmConfig, Config
from mrl.config.values import expected
from mrl.trainer.validation.ranges import RANGES, WEIGHTS

HEAD = """# Every field of a config

Written by `python -m mrl.trainer.validation.docs_reference` from `mrl/config/config.py`, which a test checks.
How a config is written, and which fields are set most often: [configuring a run](configuring.md).
"""


def reference() -> str:
    """Returns the page as Markdown."""
    return HEAD + "".join(_section(item.name, get_type_hints(Config)[item.name]) for item in fields(Config))


def _section(path: str, kind: Any) -> str:
    """Returns the heading and table of a section, followed by its nested sections."""
    rows, inner, hints, lines = [], [], get_type_hints(kind), documentation(kind)
    for item in fields(kind):
        key, of_field = f"{path}.{item.name}", hints[item.name]
        entries: Any = next(filter(is_dataclass, get_args(of_field)), None)
        if is_dataclass(of_field):
            inner.append(_section(key, of_field))
            continue
        if entries is not None:
            inner.append(_section(f"{key}[*]", entries))
        default = item.default if item.default_factory is MISSING else item.default_factory()
        words = (f"`{key}`", expected(of_field), f"`{_yaml(default)}`", range_of(key), lines.get(item.name, ""))
        rows.append("| " + " | ".join(word.replace("|", "\\|") for word in words) + " |")
    table = "\n".join(["| Key | Takes | Default | Range | |", "|---|---|---|---|---|", *rows])
    return f"\n## {path}\n\n{inspect.getdoc(kind)}\n" + (f"\n{table}\n" if rows else "") + "".join(inner)


def documentation(kind: Any) -> dict[str, str]:
    """Returns the docstring of each field of a dataclass, on one line."""
    bodies = [
        ast.parse(inspect.getsource(each)).body[0].body  # type: ignore[attr-defined]
        for each in reversed(kind.__mro__[:-1])
    ]
    return {
        ast.unparse(above.target): " ".join(str(ast.literal_eval(below.value)).split())
        for body in bodies
        for above, below in itertools.pairwise(body)
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


def range_of(key: str) -> str:
    """Returns the range of a field as text, "[0, 1]"; "" if every value of its type is allowed."""
    of_algorithm = {f"algorithm.{name}": words for name, _, _, words in ranges(AlgorithmConfig())}
    return (RANGES | of_algorithm | {"reward.functions[*].weight": WEIGHTS}).get(key, "")


def _yaml(value: Any) -> str:
    """Formats a default value as YAML."""
    return value if isinstance(value, str) and value else json.dumps(value, default=vars)


if __name__ == "__main__":
    sys.stdout.write(reference())
