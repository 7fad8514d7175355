"""Public data sets, one file each: files on the hub, conversion of raw rows to prompts, and the reward."""
