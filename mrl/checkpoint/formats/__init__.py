"""Checkpoint formats, read and written tensor by tensor: Hugging Face (folders and hub), Megatron, TensorRT-LLM.

Tensors have the names and shapes of a Hugging Face folder.
"""
