"""Checkpoint formats, read and written tensor by tensor: Hugging Face, Megatron, TensorRT-LLM; the hub.

Tensors have the names and shapes that they have in a Hugging Face folder.
"""
