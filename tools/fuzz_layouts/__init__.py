"""Layout fuzzing (`tools/campaign.py`): random configs and data, run as one process and at a random layout."""
