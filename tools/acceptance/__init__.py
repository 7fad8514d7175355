"""Acceptance tests of GPUs, TensorRT-LLM and vLLM (`tools/accept_*.py`): checks, processes, and the report."""
