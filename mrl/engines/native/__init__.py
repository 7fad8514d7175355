"""The embedded PyTorch engine."""
