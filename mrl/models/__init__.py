"""Model families (llama, qwen2 ...), one table of parameters each; config.json; presets with random weights."""

NOT_PLUGINS = ("hf_config", "presets")
"""Modules of this folder that define no model family."""
