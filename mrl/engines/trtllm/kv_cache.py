"""Size of TensorRT-LLM's KV cache under a `rollout` config, for `mrl plan`. Imports no torch and no TensorRT-LLM."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mrl.config.config import RolloutConfig
from mrl.engines.trtllm.engine_kwargs import user_arguments

SECTION = "kv_cache_config"
AUTO = "auto"
ITEM_BYTES = {"fp8": 1.0, "nvfp4": 0.5 + 1 / 16}
"""Bytes per element; 16 elements of NVFP4 share an FP8 scale (`KVCacheManager.calculate_scaling_factor_size_bytes`)."""
TOKENS_PER_BLOCK = 32
"""Default block size of the paged cache."""


@dataclass(frozen=True)
class KvCache:
    """Paged KV cache of complete blocks.

    Attributes:
        item_bytes: Bytes per element of a key or a value.
        block_tokens: Page size, tokens.
        max_tokens: Configured capacity in tokens; None: limited only by memory.
        max_bytes: Configured capacity in bytes; None: limited by `rollout.gpu_memory_utilization`.
    """

    item_bytes: float
    block_tokens: int
    max_tokens: int | None
    max_bytes: int | None

    def row_bytes(self, elements: int, num_tokens: int) -> int:
        """Returns the bytes of a sequence's keys and values.

        Args:
            elements: Key and value elements per token.
            num_tokens: Length of the sequence.
        """
        return int(math.ceil(num_tokens / self.block_tokens) * self.block_tokens * elements * self.item_bytes)

    def bounded(self, num_bytes: int, elements: int) -> int:
        """Returns the bytes that the cache uses of `num_bytes` available ones, given `elements` per token."""
        bounds = [num_bytes]
        if self.max_tokens is not None:
            bounds.append(self.row_bytes(elements, self.max_tokens))
        if self.max_bytes is not None:
            bounds.append(self.max_bytes)
        return min(bounds)


def kv_cache(rollout: RolloutConfig, itemsize: int) -> KvCache:
    """Returns the cache of `rollout.name=trtllm`.

    Args:
        rollout: Config section.
        itemsize: Bytes per element of the model's dtype.
    """
    given = user_arguments(rollout).get(SECTION) or {}
    return KvCache(
        item_bytes=ITEM_BYTES.get(given.get("dtype", AUTO), float(itemsize)),
        block_tokens=given.get("tokens_per_block", TOKENS_PER_BLOCK),
        max_tokens=given.get("max_tokens"),
        max_bytes=given.get("max_gpu_total_bytes") or None,
    )
