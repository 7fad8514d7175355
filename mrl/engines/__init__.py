"""The rollout engines `native/`, `vllm/` and `trtllm/`, and the interface of a new one (`base.py`)."""
