"""`rollout.name=trtllm_engine`: built TensorRT engines; see `trtllm/trt_engine.py`.

`ENGINE` is resolved on first use, so that `FIELDS` can be read without torch and without TensorRT-LLM.
"""

from __future__ import annotations

from typing import Any

from mrl.engines.trtllm.built_fields import FIELDS as FIELDS


def __getattr__(name: str) -> Any:
    if name == "ENGINE":
        from mrl.engines.trtllm.trt_engine import BuiltEngine

        return BuiltEngine
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
