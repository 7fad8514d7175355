"""Formulas: log-probabilities, advantages, KL estimates, losses, importance ratios, sampling, the learning rate.

They know no process and no config: torch only.
"""
