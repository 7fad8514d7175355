"""Acceptance checks of `tools/accept_*.py` for a GPU, TensorRT-LLM and vLLM, and the page with their results."""
