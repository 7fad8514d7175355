"""Keys of LoRA in verl's model section: those of its FSDP actor (`lora_rank`, ...) and of Megatron's (`lora.*`)."""

from __future__ import annotations

import re
from typing import Any

NO_DROPOUT = (
    "no dropout of adapters: a batch is scored more than once, and each time would have other log-probabilities"
)
NO_DORA = "no DoRA: adapters are LoRA's pairs, actor.lora"
NO_CRITIC = "not translated: set critic.lora, whose adapters share the actor's frozen weights"
IN_ENGINE = "it follows from actor.lora"
MERGED = "the engine stores no adapters: they are merged into its weights"

OWN: tuple[str, ...] = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
"""Keys of the FSDP actor, in the order rank, alpha, target modules, excluded modules, adapters to start from."""
MEGATRONS: tuple[str, ...] = tuple(
    f"lora.{name}" for name in ("rank", "alpha", "target_modules", "exclude_modules", "adapter_path")
)
"""Keys of the Megatron actor, in the same order."""

MAPS: dict[str, tuple[str, Any, str]] = {
    "lora_rank": ("actor.lora.rank", 0, "FSDP's"),
    "lora_alpha": ("actor.lora.alpha", 16, "FSDP's; default 32 in mrl"),
    "target_modules": ("actor.lora.target_modules", "all-linear", "FSDP's; not a regular expression"),
    "exclude_modules": ("actor.lora.exclude_modules", None, "FSDP's; not a regular expression"),
    "lora_adapter_path": (
        "actor.lora.adapter_path", None, "FSDP's; rank, alpha and modules are then the folder's, if it is there"),
    "lora.rank": ("actor.lora.rank", 0, "Megatron's"),
    "lora.alpha": ("actor.lora.alpha", 32, "Megatron's"),
    "lora.target_modules": (
        "actor.lora.target_modules", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
        "Megatron's; `linear_qkv` is `q_proj`, `k_proj` and `v_proj`, and so on"),
    "lora.exclude_modules": ("actor.lora.exclude_modules", [], "Megatron's; likewise"),
    "lora.lora_A_init_method": ("actor.lora.init", "xavier", "Megatron's; `kaiming`, the default in mrl"),
    "lora.merge": (
        "actor.lora.merge", False, "true unless it is set; samples differ by rounding only"),
    "lora.dtype": ("actor.lora.dtype", None, "Megatron's"),
    "lora.adapter_path": ("actor.lora.adapter_path", None, "Megatron's; only a PEFT folder"),
}  # fmt: skip
"""Key below `actor_rollout_ref.model.` -> (mrl's key, verl's default, how values differ)."""

MOOT: dict[str, str] = {
    "lora.fully_sharded_loras": IN_ENGINE,
    "lora.a2a_experimental": "speed only",
    "lora.dropout_position": "only with dropout",
    "lora.freeze_*": "only for images",
}
"""Pattern below `actor_rollout_ref.model.` -> why no value needs a counterpart."""

MISSING: dict[str, str] = {
    "lora.type": "`lora` and `canonical_lora` are actor.lora; there is no `dora`, and no `vlm_lora`",
    "lora.dropout": NO_DROPOUT,
    "lora.lora_B_init_method": "lora_B starts at zero",
}
"""Key below `actor_rollout_ref.model.` -> why another value than verl's default has no counterpart."""

MODULES: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
}
"""Name of Megatron's module -> Hugging Face names of its projections."""

EVERYTHING = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections that all together are all-linear."""

WITHOUT_ADAPTERS = ("router", "gate", "lm_head", "embed_tokens", "output_layer", "embedding", "score")
"""Modules that verl may adapt and mrl does not."""

HINTS: dict[re.Pattern[str], str] = {
    re.compile(r"lora.*dropout"): NO_DROPOUT,
    re.compile(r"(?<![a-z])(?:use_)?dora(?![a-z])"): NO_DORA,
    re.compile(r"(?<![a-z])(?:qlora|load_in_[48]bit)(?![a-z])"): "no QLoRA: frozen weights are bf16 or fp32",
    re.compile(r"(?<![a-z])modules_to_save(?![a-z])"): "with LoRA nothing but adapters to train, actor.lora",
    re.compile(r"^critic\..*lora"): NO_CRITIC,
    re.compile(
        r"^(?!actor\.lora\.).*(?<![a-z])(?:lora|peft|adapters?|target_modules)(?![a-z])"
    ): "LoRA in the section actor.lora (rank, alpha, target_modules, ...; docs/lora.md)",
}
"""Pattern in a key, in any trainer's words -> what mrl has instead, or does not have; the first match counts."""
