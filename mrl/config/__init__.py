"""Every setting with its default; overrides; Megatron's own fields; the keys of verl and other trainers."""
