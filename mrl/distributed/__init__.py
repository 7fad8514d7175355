"""Processes: what launchers say, where ranks meet, groups, collectives; Megatron-Core made to run on a CPU."""
