"""What a run takes before it runs: memory, time, traffic, and whether it fits; the dry run."""
