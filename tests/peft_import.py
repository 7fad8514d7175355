"""Imports of peft, which imports TransformerEngine if it is installed: here only its Python code is, which fails."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class PeftFinder(MetaPathFinder):
    """Lets peft, imported by a test or by trl, find no TransformerEngine."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Returns peft's spec, with a loader that hides TransformerEngine meanwhile."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == "peft" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def hidden(module: Any) -> None:
                found = sys.modules.get("transformer_engine")
                sys.modules["transformer_engine"] = None  # type: ignore[assignment]
                try:
                    execute(module)
                finally:
                    del sys.modules["transformer_engine"]
                    if found is not None:
                        sys.modules["transformer_engine"] = found

            spec.loader.exec_module = hidden  # type: ignore[method-assign]
        return spec
