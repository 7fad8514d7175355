"""Rollout engines behind the interface in `base`."""
