"""`mrl plan` and `--dry-run`: memory of a rank, time and traffic of a step, whether it fits, before it runs."""
