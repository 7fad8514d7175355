"""Keys of verl, TRL and Megatron, and their counterparts in mrl."""
