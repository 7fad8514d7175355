"""Random runs, each as one process and as a random layout: do they agree? `tools/campaign.py` is the command."""
