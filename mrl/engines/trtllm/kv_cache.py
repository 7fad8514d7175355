"""How large TensorRT-LLM makes the KV cache that `rollout` asks for, in bytes of a token and at most.

Owns what the fields of `KvCacheConfig` mean for memory; `mrl plan` asks. It imports no torch and no TensorRT-LLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mrl.config.config import RolloutConfig
from mrl.engines.trtllm.engine_kwargs import given_by

SECTION = "kv_cache_config"
AUTO = "auto"
ITEM_BYTES = {"fp8": 1.0, "nvfp4": 0.5 + 1 / 16}
"""Of an element; each 16 of NVFP4 share a scale in FP8 (`KVCacheManager.calculate_scaling_factor_size_bytes`)."""
TOKENS_PER_BLOCK = 32
"""Of its paged cache, where nothing else is asked for."""


@dataclass(frozen=True)
class KvCache:
    """A cache of whole blocks.

    Attributes:
        item_bytes: Of one element of a key or a value.
        block_tokens: Tokens of a block.
        max_tokens: That it holds at most; None: as many as its memory holds.
        max_bytes: That it takes at most; None: what `rollout.gpu_memory_utilization` says.
    """

    item_bytes: float
    block_tokens: int
    max_tokens: int | None
    max_bytes: int | None

    def row_bytes(self, elements: int, num_tokens: int) -> int:
        """A sequence of so many tokens, with `elements` of keys and values for each."""
        return int(math.ceil(num_tokens / self.block_tokens) * self.block_tokens * elements * self.item_bytes)

    def bounded(self, num_bytes: int, elements: int) -> int:
        """What it takes of so many bytes that it may have."""
        bounds = [num_bytes]
        if self.max_tokens is not None:
            bounds.append(self.row_bytes(elements, self.max_tokens))
        if self.max_bytes is not None:
            bounds.append(self.max_bytes)
        return min(bounds)


def kv_cache(rollout: RolloutConfig, itemsize: int) -> KvCache:
    """The cache of `rollout.name=trtllm`, whose other elements have so many bytes."""
    given = given_by(rollout).get(SECTION) or {}
    return KvCache(
        item_bytes=ITEM_BYTES.get(given.get("dtype", AUTO), float(itemsize)),
        block_tokens=given.get("tokens_per_block", TOKENS_PER_BLOCK),
        max_tokens=given.get("max_tokens"),
        max_bytes=given.get("max_gpu_total_bytes") or None,
    )
