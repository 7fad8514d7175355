"""Names that other trainers have for what mrl has: facts, no code of theirs."""
