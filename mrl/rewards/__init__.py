"""Reward functions: `base` and one file each."""
