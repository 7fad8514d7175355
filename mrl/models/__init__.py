"""Model families: `base` and one table per family."""
