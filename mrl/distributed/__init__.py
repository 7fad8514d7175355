"""Processes: `mrl launch`, what launchers say, where ranks meet, groups, collectives; Megatron-Core on a CPU."""
