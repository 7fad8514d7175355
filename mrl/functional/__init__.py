"""Formulas on tensors: log-probabilities, advantages, KL estimates, policy losses, importance ratios, sampling.

They know no process and no config: torch only.
"""
