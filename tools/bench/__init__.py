"""What the bench_*.py programs share: measuring, alternating runs, roofline figures, plain Megatron as a baseline."""
