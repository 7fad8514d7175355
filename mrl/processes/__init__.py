"""Worker processes for foreign code: words to and from them, limits, sandboxes, and that nothing of them is left."""
