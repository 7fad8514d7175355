"""Files that are on the disk when a call returns, whole or not at all."""
