"""Stands in for the LLM API."""
