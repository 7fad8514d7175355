"""Reward functions, one file each, and worker processes that run user-defined rewards with time and memory limits."""

NOT_PLUGINS = ("scorer",)
