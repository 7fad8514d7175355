"""Rules of low-rank adapters that vLLM stores beside the weights. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.config import Config
from mrl.models.base import ArchSpec
from mrl.resharding.lora import adapted_modules

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`."""


def adapter_rules(config: Config, arch: ArchSpec) -> Iterator[str]:
    """Yields a message for each setting of `actor.lora` that vLLM cannot store."""
    lora, stored = config.actor.lora, config.rollout.dtype or config.model.dtype
    if not lora.rank or lora.merge:
        return
    if lora.rank > RANKS[-1]:
        yield f"actor.lora.merge=false with rank={lora.rank}: vLLM has ranks up to {RANKS[-1]}. Set it to true."
    if lora.dtype not in (None, stored):
        yield (
            f"actor.lora.dtype={lora.dtype} with actor.lora.merge=false: vLLM stores adapters in the dtype of its "
            f"weights, {stored}. Remove it, or set merge=true."
        )
    if any(".experts." in module for module in adapted_modules(arch, lora)):
        yield (
            "actor.lora.merge=false with rollout.name=vllm and adapters of experts: mrl writes only those of attention "
            "and dense MLPs into vLLM. Set merge=true, or leave the experts out (actor.lora.exclude_modules)."
        )
