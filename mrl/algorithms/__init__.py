"""GRPO, DAPO, PPO and other algorithms, one file each; `functional/` has the formulas."""

NOT_PLUGINS = ("functional",)
"""Modules of this folder that define no algorithm."""
