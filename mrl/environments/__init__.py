"""Environments and tools of multi-turn episodes, one file each; `formats/` contains the tool-call parsers."""
