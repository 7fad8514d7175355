"""Prompts, tokenizers, packing."""
