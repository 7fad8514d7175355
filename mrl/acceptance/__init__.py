"""`tools/accept_gpu.py`, `tools/accept_trtllm.py`: do a GPU and TensorRT-LLM do what mrl expects? Checks, page."""
