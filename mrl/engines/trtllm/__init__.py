"""TensorRT-LLM's LLM API as the rollout engine, in the ranks' own processes. No other folder imports TensorRT-LLM.

`ENGINE` is resolved on first use, so that `SUPPORT` can be read without torch and without TensorRT-LLM.
"""

from __future__ import annotations

from typing import Any

from mrl.engines.trtllm.support import SUPPORT as SUPPORT


def __getattr__(name: str) -> Any:
    if name == "ENGINE":
        from mrl.engines.trtllm.engine import LlmEngine

        return LlmEngine
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
