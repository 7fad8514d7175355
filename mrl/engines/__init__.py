"""The engines that generate text, `native/` and `trtllm/`, and the interface of a new one (`base.py`)."""
