"""Rules of `actor.lora`, low-rank adapters. Imports no torch."""

from __future__ import annotations

import os.path
from collections.abc import Iterator
from dataclasses import fields

from mrl.config.config import Config, LoraConfig
from mrl.config.did_you_mean import did_you_mean_path
from mrl.engines._capabilities import engine_capabilities
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.resharding.lora import adapted_modules

ADAPTER_CONFIG = "adapter_config.json"


def lora_rules(config: Config) -> Iterator[str]:
    """Yields a message for each broken rule that needs no model."""
    lora = config.actor.lora
    if not lora.rank:
        default = LoraConfig()
        for item in fields(LoraConfig):
            if getattr(lora, item.name) != getattr(default, item.name):
                yield (
                    f"actor.lora.{item.name} is set, but would have no effect because actor.lora.rank is 0. Remove it, "
                    "or change that."
                )
        return
    if config.rollout.true_on_policy:
        yield (
            "actor.lora.rank with rollout.true_on_policy=true: the engine computes with merged weights, the actor adds "
            "the adapters' product, and the two round differently. Set one of them back."
        )
    if config.megatron.transformer.get("moe_shared_expert_overlap"):
        yield (
            "actor.lora.rank with megatron.transformer.moe_shared_expert_overlap=true: the overlapped shared expert "
            "leaves sums unfinished that its adapters would need. Set one of them back."
        )
    if not lora.merge and not engine_capabilities(config.rollout.name).stores_adapters:
        yield (
            f"actor.lora.merge=false with rollout.name={config.rollout.name}: this engine stores no adapters beside "
            "the weights. Set actor.lora.merge=true."
        )
    path = config.reference.path
    if path is not None and path != config.model.path and not os.path.isfile(os.path.join(path, ADAPTER_CONFIG)):
        yield (
            f"reference.path='{path}' with actor.lora.rank: the reference shares the actor's frozen weights, so it can "
            f"only be model.path, or a folder of adapters for it ({ADAPTER_CONFIG}). Remove it for model.path."
        )
    if lora.adapter_path is not None and not os.path.isfile(os.path.join(lora.adapter_path, ADAPTER_CONFIG)):
        yield (
            f"actor.lora.adapter_path='{lora.adapter_path}' has no {ADAPTER_CONFIG}."
            f"{did_you_mean_path(lora.adapter_path)} Name a folder that PEFT's save_pretrained wrote."
        )


def adapted_module_rules(config: Config, arch: ArchSpec) -> Iterator[str]:
    """Yields a message where `target_modules` or `exclude_modules` do not fit the model."""
    if config.actor.lora.rank:
        try:
            adapted_modules(arch, config.actor.lora)
        except UserError as error:
            yield str(error)
