"""`tools/accept_trtllm.py`: does TensorRT-LLM on your GPU do what mrl expects of it? The checks and their page."""
