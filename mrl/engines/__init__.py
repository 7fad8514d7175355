"""The engines that generate text, `native/`, `trtllm/` and `vllm/`, and the interface of a new one (`base.py`)."""
