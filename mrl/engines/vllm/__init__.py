"""vLLM in the training ranks' own processes; the only folder that imports vLLM.

`ENGINE` is imported on first use, so that `CAPABILITIES` can be read without torch and vLLM.
"""

from __future__ import annotations

from typing import Any

from mrl.engines.vllm.capabilities import CAPABILITIES as CAPABILITIES


def __getattr__(name: str) -> Any:
    if name == "ENGINE":
        from mrl.engines.vllm.engine import VllmEngine

        return VllmEngine
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
