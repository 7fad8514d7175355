"""Parts shared by bench_*.py: measuring, alternating runs, lower bounds, plain Megatron-Core as a baseline."""
