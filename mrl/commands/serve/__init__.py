"""OpenAI-compatible HTTP server over a rollout engine."""
