"""What a run keeps on disk: where each file is, checkpoints, what a commit is (`manifest.py`), who owns the folder."""
