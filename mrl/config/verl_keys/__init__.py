"""What other trainers call what mrl has: verl's keys, TRL's, Megatron's."""
