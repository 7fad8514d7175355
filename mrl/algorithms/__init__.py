"""GRPO, DAPO, PPO and the others, one file each; `functional/` has the formulas."""

NOT_PLUGINS = ("functional",)
"""Modules of this folder that define no algorithm."""
