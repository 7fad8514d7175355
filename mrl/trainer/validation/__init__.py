"""Validation of the config before anything starts: one file of rules for each section of the config."""
