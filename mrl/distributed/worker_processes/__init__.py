"""Worker processes for code of others: messages, limits, sandboxes, lists of system calls, temporary folders."""
