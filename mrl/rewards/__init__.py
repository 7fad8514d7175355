"""Built-in reward functions, one file each, and worker processes that run reward functions under limits."""
