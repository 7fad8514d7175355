"""Prompts from files or made by a task, tokenizers and chat templates, shuffling, packing into microbatches."""
