"""Config from which a forward-only model (separate teacher, reward model) is built like an actor. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from mrl.config.config import Config, LoraConfig


def forward_only_config(config: Config) -> Config:
    """Returns the config from which a forward-only model is built like an actor, offloaded while it is not used."""
    actor = replace(
        config.actor, param_offload=True, grad_offload=True, optimizer_offload=True, router_replay="none",
        recompute="none", lora=LoraConfig(),
    )  # fmt: skip
    return replace(config, actor=actor)
