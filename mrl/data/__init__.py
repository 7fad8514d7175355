"""Prompts from files or made by a task, in an order that a resume repeats (`prompts.py`); tokenizers; packing."""
