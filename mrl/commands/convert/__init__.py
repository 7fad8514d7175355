"""Conversion of checkpoints between formats, and their comparison."""
