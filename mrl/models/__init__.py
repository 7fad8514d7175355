"""Model families, one file with a parameter table each (`llama.py`, `qwen3_moe.py`); presets; `kernels/` for CPUs."""

NOT_PLUGINS = ("hf_config", "kernels", "presets", "transformer_engine")
"""Modules of this folder that define no model family."""
