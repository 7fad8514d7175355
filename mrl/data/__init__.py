"""Prompts from files or from a task, in an order that a resume repeats; tokenizers; chat templates; packing."""
