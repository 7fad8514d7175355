"""What a run keeps on disk: where each file is, checkpoints, what a commit is (`commit.py`), who owns the folder."""
