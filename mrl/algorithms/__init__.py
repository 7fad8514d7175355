"""Algorithms: `base` and one file each."""
