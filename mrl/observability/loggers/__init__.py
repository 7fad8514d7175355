"""Destinations of metrics, one module each."""
