"""Reward functions, one file each, and the workers that run yours with limits of time and memory."""
