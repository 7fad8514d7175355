"""Checkpoints on disk, format by format: each is read and written tensor by tensor in Hugging Face coordinates."""
