"""What of Megatron's own configuration may be passed through, and what mrl makes of each field.

Fields, types and defaults are read from the installed Megatron's files without importing it (`installed.py`), what a
field may be set to is said by `values.py`, what mrl makes of it by `table.py`, and what is on by itself where
TransformerEngine is in use by `defaults.py`. Rules that need the rest of the config are in
`trainer/validation/megatron.py`; the values reach Megatron in `megatron/`.
"""
