"""Everything on disk: `run_dir/` (checkpoints, lock), `formats/` (Hugging Face, Megatron, TensorRT-LLM), `io/`."""
