"""Environments of multi-turn episodes, one file each, tools and tool-call formats; they run in workers (`pool.py`)."""
