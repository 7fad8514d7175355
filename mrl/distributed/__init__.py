"""Processes: launch environment, groups, collectives, device."""
