"""One run put together: trainer, rollout worker, reference, critic, checkpointing; `validation/` of the config."""
