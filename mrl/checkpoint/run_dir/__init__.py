"""The run folder: paths (`run_dir.py`), checkpoints, their manifest, the lock on the folder, the hint how to resume."""
