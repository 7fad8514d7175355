"""Stands before the installed vLLM on the path of tests that are not about its import, which takes ten seconds."""
