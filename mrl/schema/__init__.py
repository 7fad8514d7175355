"""How YAML and `key=value` become typed values, and how a name or a path becomes code (`registry.py`)."""
