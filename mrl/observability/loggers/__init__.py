"""Where metrics go: one file per place."""
