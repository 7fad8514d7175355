"""Model families, one table of parameters each (`llama.py`, `qwen3_moe.py`); presets; `kernels/` for CPUs."""

NOT_PLUGINS = ("hf_config", "kernels", "presets", "transformer_engine")
"""Modules of this folder that define no model family."""
