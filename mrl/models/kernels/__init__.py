"""Compiled functions: rows with bits of their own, copies with sums; how they are compiled."""
