"""Files that survive a kill or a power failure: atomic and fsynced writes, hashed output, logs, resumable folders."""
