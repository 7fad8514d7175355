"""`mrl plan` and `--dry-run`: predicts memory, time and traffic of a run from shapes, and whether it fits."""
