"""What a user runs on a GPU to see whether TensorRT-LLM does what mrl was written for: `tools/accept_trtllm.py`."""
