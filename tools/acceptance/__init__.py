"""`tools/accept_*.py`: do a GPU, TensorRT-LLM and vLLM do what mrl expects? Checks, page."""
