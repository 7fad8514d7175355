"""How large vLLM's KV cache is made: what the longest sequences take, within what the run allows.

Owns that rule, for the engine's start and for `commands/plan/`. It imports no torch and no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config.config import RolloutConfig
from mrl.engines.vllm.engine_kwargs import given_by
from mrl.errors import UserError
from mrl.models.base import ArchSpec

ROUND = 128
"""Tokens to which a sequence's part is rounded up, where no block is larger; vLLM's own are at most as large."""


@dataclass(frozen=True)
class KVCache:
    """The cache of one rank.

    Attributes:
        sequence_bytes: Of one sequence of full length.
        wanted_bytes: Of `rollout.max_num_seqs` of them.
    """

    sequence_bytes: int
    wanted_bytes: int

    def within(self, budget: int, rollout: RolloutConfig) -> int:
        """Bytes that it is made with, of `budget` that the run allows.

        Raises:
            UserError: Not one sequence fits.
        """
        if self.sequence_bytes > budget:
            raise UserError(
                f"The KV cache of one sequence of {rollout.longest} tokens takes {self.sequence_bytes / 1e6:,.1f} MB, "
                f"and rollout.gpu_memory_utilization={rollout.gpu_memory_utilization} leaves {budget / 1e6:,.1f} MB. "
                "Raise it, or lower rollout.max_model_len, or raise rollout.tensor_model_parallel_size."
            )
        return min(budget, self.wanted_bytes)


def item_bytes(rollout: RolloutConfig, engine_bytes: int) -> int:
    """Of one element: `kv_cache_dtype` of vLLM's own arguments goes before the engine's dtype."""
    return 1 if str(given_by(rollout).get("kv_cache_dtype", "")).startswith("fp8") else engine_bytes


def block_tokens(rollout: RolloutConfig) -> int:
    """To which a sequence's part is rounded up: `block_size` of vLLM's own arguments may be larger than `ROUND`."""
    given = given_by(rollout).get("block_size")
    return max(ROUND, given) if isinstance(given, int) else ROUND


def kv_cache(rollout: RolloutConfig, arch: ArchSpec, engine_bytes: int) -> KVCache:
    """The cache that a run wants.

    Args:
        rollout: The section.
        arch: The model.
        engine_bytes: Of an element of the engine's dtype.
    """
    heads = max(1, arch.num_kv_heads // rollout.tensor_model_parallel_size)
    block = block_tokens(rollout)
    tokens = (-(-rollout.longest // block) + 1) * block  # vLLM keeps one for itself
    each = tokens * 2 * arch.num_layers * heads * arch.head_dim * item_bytes(rollout, engine_bytes)
    return KVCache(each, each * rollout.max_num_seqs)
