"""Reward functions, one file each; yours run in workers with limits of time (`_remote.py`), memory (`_keeper.py`)."""
