"""Reward functions, one file each; yours run in workers with limits of time and memory (`_pool.py`)."""
