"""Parsers of tool calls, one file per format, named as in verl and vLLM."""
