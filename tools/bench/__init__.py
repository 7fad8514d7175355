"""Helpers of the bench_*.py programs: measuring, alternating runs, roofline, and a plain Megatron-Core baseline."""
