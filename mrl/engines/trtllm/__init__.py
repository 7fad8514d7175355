"""TensorRT-LLM's LLM API as the rollout engine, in the ranks' own processes. No other folder imports TensorRT-LLM.

`ENGINE` is resolved on first use, so that `CAPABILITIES` can be read without torch and without TensorRT-LLM.
"""

from __future__ import annotations

from typing import Any

from mrl.engines.trtllm.capabilities import CAPABILITIES as CAPABILITIES


def __getattr__(name: str) -> Any:
    if name == "ENGINE":
        from mrl.engines.trtllm.engine import LlmEngine

        return LlmEngine
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
