"""A stand-in for TensorRT-LLM, strict where the real package is: for mrl's tests only, it is no TensorRT-LLM.

Arguments are held against tests/engines/trtllm/signatures.json; calls out of order, wrong tags and buffers that change
before they were read raise. mrl's native engine computes the tokens, on the CPU. The tests put this folder on sys.path.
`faults` says what a test wants to go wrong.
"""

import importlib

from tests.engines.trtllm.signature import flavour

__version__ = {"1.2": "1.2.1", "1.3": "1.3.0rc21"}[flavour()]
_HOMES = {"LLM": "tensorrt_llm.llmapi.llm", "SamplingParams": "tensorrt_llm.sampling_params"}


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(importlib.import_module(_HOMES[name]), name)
