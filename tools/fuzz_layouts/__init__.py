"""Fuzzing of `tools/campaign.py`: random configs and data, run in one process and in a random layout, compared."""
