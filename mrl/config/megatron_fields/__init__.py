"""Fields of Megatron's configuration that the section `megatron` may pass through.

`installed.py` reads fields, types and defaults from the installed Megatron's files without importing it, `values.py`
checks value types, `table.py` classifies each field, and `defaults.py` lists what is enabled automatically with
TransformerEngine. Rules that need the rest of the config are in `trainer/validation/megatron.py`; `megatron/` applies
the values.
"""
