"""Ends jobs reliably: stop signals, time limits, a watchdog for hanging or lost ranks, and restarts."""
