"""Helpers of the bench_*.py programs: measuring, alternating runs, roofline figures, and a plain Megatron-Core
baseline.
"""
