"""Environments and tools of multi-turn episodes, one file each, and `formats/`, the tool-call parsers."""

NOT_PLUGINS = ("formats", "openai_requests", "pool", "toolbox")
