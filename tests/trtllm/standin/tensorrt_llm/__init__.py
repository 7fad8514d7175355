"""Stands in for TensorRT-LLM in these tests alone; no part of it is NVIDIA's."""

from tests.trtllm.signature import flavour

__version__ = {"1.2": "1.2.1", "1.3": "1.3.0rc21"}[flavour()]
