"""Metrics, timers, loggers, report."""
