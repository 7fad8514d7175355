"""Size of vLLM's KV cache: enough for `max_num_seqs` sequences of full length, within the budget of the run.

Used by the engine's start and by `commands/plan/`. Imports no torch and no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config.config import RolloutConfig
from mrl.engines.vllm.engine_kwargs import user_arguments
from mrl.errors import UserError
from mrl.models.base import ArchSpec

ROUND = 128
"""Tokens to which a sequence is rounded up, unless `block_size` is larger; vLLM's default blocks are at most this
large."""


@dataclass(frozen=True)
class KVCacheSize:
    """KV cache of one rank.

    Attributes:
        sequence_bytes: Bytes of one sequence of full length.
        wanted_bytes: Bytes of `rollout.max_num_seqs` such sequences.
    """

    sequence_bytes: int
    wanted_bytes: int

    def within(self, budget: int, rollout: RolloutConfig) -> int:
        """Returns the size to allocate, bytes, at most `budget`.

        Raises:
            UserError: Not even one sequence fits.
        """
        if self.sequence_bytes > budget:
            raise UserError(
                f"The KV cache of one sequence of {rollout.max_sequence_length} tokens takes "
                f"{self.sequence_bytes / 1e6:,.1f} MB, and rollout.gpu_memory_utilization="
                f"{rollout.gpu_memory_utilization} leaves {budget / 1e6:,.1f} MB. "
                "Raise it, or lower rollout.max_model_len, or raise rollout.tensor_model_parallel_size."
            )
        return min(budget, self.wanted_bytes)


def item_bytes(rollout: RolloutConfig, engine_bytes: int) -> int:
    """Returns the bytes of one element; vLLM's own argument `kv_cache_dtype` overrides the engine's dtype."""
    return 1 if str(user_arguments(rollout).get("kv_cache_dtype", "")).startswith("fp8") else engine_bytes


def block_tokens(rollout: RolloutConfig) -> int:
    """Returns the tokens to which a sequence is rounded up; vLLM's own argument `block_size` may exceed `ROUND`."""
    given = user_arguments(rollout).get("block_size")
    return max(ROUND, given) if isinstance(given, int) else ROUND


def kv_cache(rollout: RolloutConfig, arch: ArchSpec, engine_bytes: int) -> KVCacheSize:
    """Returns the wanted cache sizes of a run.

    Args:
        rollout: `rollout` section.
        arch: Sizes of the model.
        engine_bytes: Bytes of an element of the engine's dtype.
    """
    numbers = 2 * max(1, arch.num_kv_heads // rollout.tensor_model_parallel_size) * arch.head_dim
    if arch.mla is not None:
        numbers = arch.mla.cache_dim
    block = block_tokens(rollout)
    tokens = (-(-rollout.max_sequence_length // block) + 1) * block  # vLLM reserves one block
    each = tokens * arch.num_layers * numbers * item_bytes(rollout, engine_bytes)
    return KVCacheSize(each, each * rollout.max_num_seqs)


def derived_bytes(arch: ArchSpec, tp: int, engine_bytes: int) -> int:
    """Returns the bytes of the matrices that vLLM derives from `kv_b_proj` in latent attention, on a rank.

    Args:
        arch: Sizes of the model.
        tp: Ranks of a replica.
        engine_bytes: Bytes of an element of the engine's dtype.
    """
    if arch.mla is None:
        return 0
    rows = arch.num_heads // tp * (arch.mla.qk_nope_head_dim + arch.mla.v_head_dim)
    return arch.num_layers * rows * arch.mla.kv_lora_rank * engine_bytes
