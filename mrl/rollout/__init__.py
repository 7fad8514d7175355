"""Prompts assigned to engines, the rollout buffer, dispatch to data-parallel ranks, async schedule; `episodes/`."""
