"""The session of one engine: what `ModelRunner` keeps between calls."""

from __future__ import annotations

import os

from tests.engines.trtllm.signature import Fields

DISABLE_TORCH_DEVICE_SET = os.environ.get("DISABLE_TORCH_DEVICE_SET", False)


class SamplingConfig(Fields):
    entry = "tensorrt_llm.runtime.SamplingConfig"

    def __init__(self, **given):
        super().__init__(**given)
        self.output_cum_log_probs = False
        self.output_log_probs = False


class _Runtime:
    def __init__(self, engine):
        self.engine = engine


class GenerationSession:
    def __init__(self, engine):
        self.runtime = _Runtime(engine)
        self.log_probs = None
        self.buffer = None
        self.buffer_allocated = False
