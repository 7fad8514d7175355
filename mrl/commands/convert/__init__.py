"""Checkpoints converted from one format into another and compared, with the proof that nothing was lost."""
