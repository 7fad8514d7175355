"""`tools/campaign.py`: random configs and data, each as one process and as a random layout, compared."""
