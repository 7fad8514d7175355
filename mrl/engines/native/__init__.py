"""The native engine, plain PyTorch on the training ranks themselves; see `engine.py`.

`ENGINE` is imported on first use, so that `CAPABILITIES` can be read without torch.
"""

from __future__ import annotations

from typing import Any

from mrl.engines.native.capabilities import CAPABILITIES as CAPABILITIES


def __getattr__(name: str) -> Any:
    if name == "ENGINE":
        from mrl.engines.native.engine import NativeEngine

        return NativeEngine
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
