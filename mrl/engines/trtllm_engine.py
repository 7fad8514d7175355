"""`rollout.name=trtllm_engine`: TensorRT engines built ahead of time; see `trtllm/trt_engine.py`.

`ENGINE` is imported on first use, so that `CAPABILITIES` can be read without torch and TensorRT-LLM.
"""

from __future__ import annotations

from typing import Any

from mrl.engines.trtllm.capabilities import BUILT_CAPABILITIES

CAPABILITIES = BUILT_CAPABILITIES


def __getattr__(name: str) -> Any:
    if name == "ENGINE":
        from mrl.engines.trtllm.trt_engine import BuiltEngine

        return BuiltEngine
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
