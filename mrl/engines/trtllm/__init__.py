"""TensorRT-LLM as the rollout engine, the one folder that imports it: its LLM API in the ranks' own processes.

`ENGINE` is found on first use, so that `FIELDS` can be read without torch and without TensorRT-LLM.
"""

from __future__ import annotations

from typing import Any

from mrl.engines.trtllm.fields import FIELDS as FIELDS


def __getattr__(name: str) -> Any:
    if name == "ENGINE":
        from mrl.engines.trtllm.engine import LlmEngine

        return LlmEngine
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
