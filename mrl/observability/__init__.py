"""Metrics, timers, loggers (one file each) and the HTML report."""
