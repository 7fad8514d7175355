"""Rules of `actor.lora`, low-rank adapters. Imports no torch."""

from __future__ import annotations

import os.path
from collections.abc import Iterator
from dataclasses import fields

from mrl.config.config import Config, LoraConfig
from mrl.config.did_you_mean import did_you_mean_path
from mrl.config.peft_folder import ADAPTER_CONFIG, ADAPTER_FOLDER, is_adapter_folder
from mrl.engines._capabilities import engine_capabilities
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.resharding.lora import adapted_modules


def lora_rules(config: Config) -> Iterator[str]:
    """Yields a message for each broken rule of `actor.lora` that needs no model."""
    lora = config.actor.lora
    yield from section_rules("actor.lora", lora, config)
    if not lora.rank:
        return
    if config.rollout.true_on_policy:
        yield (
            "actor.lora.rank with rollout.true_on_policy=true: the engine computes with merged weights, the actor adds "
            "the adapters' product, and the two round differently. Set one of them back."
        )
    if not lora.merge and not engine_capabilities(config.rollout.name).stores_adapters:
        yield (
            f"actor.lora.merge=false with rollout.name={config.rollout.name}: this engine stores no adapters beside "
            "the weights. Set actor.lora.merge=true."
        )
    path = config.reference.path
    if path is not None and path != config.model.path and not is_adapter_folder(path):
        yield (
            f"reference.path='{path}' with actor.lora.rank: the reference shares the actor's frozen weights, so it can "
            f"only be model.path, or a folder of adapters for it ({ADAPTER_CONFIG}). Remove it for model.path."
        )


def section_rules(key: str, lora: LoraConfig, config: Config) -> Iterator[str]:
    """Yields a message for each broken rule of a section with adapters' settings.

    Args:
        key: The section, such as "actor.lora".
        lora: Its settings.
        config: The config.
    """
    is_wrong_folder = lora.adapter_path is not None and not is_adapter_folder(lora.adapter_path)
    if lora.adapter_path is not None and is_wrong_folder:
        inner = os.path.join(lora.adapter_path, ADAPTER_FOLDER)
        near = f" Did you mean '{inner}'?" if is_adapter_folder(inner) else did_you_mean_path(lora.adapter_path)
        yield (
            f"{key}.adapter_path='{lora.adapter_path}' has no {ADAPTER_CONFIG}.{near} Name a folder that PEFT's "
            "save_pretrained wrote."
        )
    if not lora.rank:
        default = LoraConfig()
        for item in () if is_wrong_folder else fields(LoraConfig):  # the right folder would set the rank
            if getattr(lora, item.name) != getattr(default, item.name):
                yield (
                    f"{key}.{item.name} is set, but would have no effect because {key}.rank is 0. Remove it, or change "
                    "that."
                )
        return
    if config.megatron.transformer.get("moe_shared_expert_overlap"):
        yield (
            f"{key}.rank with megatron.transformer.moe_shared_expert_overlap=true: the overlapped shared expert leaves "
            "sums unfinished that its adapters would need. Set one of them back."
        )
    own_dtype = config.model.dtype
    if lora.dtype not in (None, own_dtype) and config.actor.transformer_impl == "te":
        yield (
            f"{key}.dtype={lora.dtype} with model.dtype={own_dtype}: TransformerEngine's layers take parameters of one "
            f"dtype. Remove {key}.dtype, or set actor.transformer_impl=local."
        )
    if lora.dtype == "bfloat16" and own_dtype == "float32" and not config.actor.use_distributed_optimizer:
        yield (
            f"{key}.dtype=bfloat16 with model.dtype=float32: Megatron's optimizer for fp32 models keeps no fp32 copies "
            f"of bf16 adapters. Remove {key}.dtype, or set actor.use_distributed_optimizer=true."
        )
    if lora.adapter_path is not None and lora.init != LoraConfig().init:
        yield f"{key}.init={lora.init} would have no effect because {key}.adapter_path is set. Remove one of them."


def adapted_module_rules(key: str, lora: LoraConfig, arch: ArchSpec) -> Iterator[str]:
    """Yields a message where `target_modules` or `exclude_modules` of a section do not fit the model."""
    if lora.rank:
        try:
            adapted_modules(arch, lora)
        except UserError as error:
            yield str(error).replace("actor.lora", key)
