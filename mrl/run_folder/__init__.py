"""What a run keeps on disk: its folder, its commits, who owns it."""
