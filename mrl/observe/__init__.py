"""Metrics, timers, loggers (a file each), charts, the HTML report; figures of GPUs (`hardware.py`)."""
