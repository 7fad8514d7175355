"""Formulas: log-probabilities, advantages, KL estimates, losses, importance ratios, sampling, the learning rate.

They depend on torch only, not on the config or on process groups.
"""
