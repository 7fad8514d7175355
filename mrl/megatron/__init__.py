"""The one folder that imports megatron.core: actor, reference, schedules, checkpoints."""
