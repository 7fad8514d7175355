"""Which experts vLLM sent each token to, for `rollout.enable_rollout_routing_replay`.

Owns what is read of each step. vLLM's `enable_return_routed_experts` is for its newer model runner alone; the hooks
under it (`RoutedExpertsCapturer`, on each layer's router) are not, and work in every runner and inside CUDA graphs. The
choice of a token is kept where the KV cache has the token: in the same block, at the same place. So a prefix that comes
from the cache has its experts too, parts of a prompt and paused requests need no care, and what a refit drops is never
read again. Read in vLLM 0.32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrl.engines.vllm.engine_fields import INSTALL
from mrl.errors import UserError
from mrl.models.base import ArchSpec, MoeSpec
from mrl.resharding.dtypes import choice_dtype

CAPTURER = "vllm.model_executor.layers.fused_moe.routed_experts_capturer"


class Experts:
    """The experts of every token whose keys and values are in the cache."""

    def __init__(self, arch: ArchSpec, moe: MoeSpec, version: str) -> None:
        """Keeps nothing until `attach`.

        Args:
            arch: The model.
            moe: Its experts.
            version: Of vLLM, for messages.
        """
        self._shape = (arch.num_layers, moe.top_k)
        self._num_experts = moe.num_experts
        self._version = version

    def attach(self, runner: Any, cache: Any) -> None:
        """Listens to the routers of a model runner from here on; before its graphs are captured.

        Args:
            runner: vLLM's, with its model loaded.
            cache: Its `KVCacheConfig`.

        Raises:
            UserError: A router cannot be listened to, or the model is another than mrl's.
        """
        from vllm.model_executor.layers.fused_moe import routed_experts_capturer as vllm

        if len(cache.kv_cache_groups) != 1:
            raise self._refusal(f"it has {len(cache.kv_cache_groups)} kinds of KV cache")
        self._capturer = vllm.RoutedExpertsCapturer(runner.max_num_tokens, runner.vllm_config)
        if self._capturer.shape_per_token != self._shape:
            raise self._refusal(f"it would tell {self._capturer.shape_per_token} a token, expected {self._shape}")
        try:
            vllm.bind_routed_experts_capturer(runner.get_model(), self._capturer)
        except ValueError as error:
            raise self._refusal(str(error)) from error
        num_slots = cache.num_blocks * cache.kv_cache_groups[0].kv_cache_spec.block_size
        self._kept = torch.full((num_slots, *self._shape), -1, dtype=choice_dtype(self._num_experts))
        self._batch = runner.input_batch
        bookkeeping = runner._bookkeeping_sync  # after each forward, while the batch is as it was

        def keep(scheduled: Any, *rest: Any) -> Any:
            self._batch = runner.input_batch
            self._keep(scheduled.num_scheduled_tokens)
            return bookkeeping(scheduled, *rest)

        runner._bookkeeping_sync = keep

    def _refusal(self, why: str) -> UserError:
        return UserError(
            f"rollout.enable_rollout_routing_replay=true: vLLM {self._version} cannot tell its experts: {why}. Set it "
            "to false, and actor.router_replay=recompute with algorithm.rollout_correction.bypass_mode=false. "
            f"{INSTALL}"
        )

    def _keep(self, num_scheduled: dict[str, int]) -> None:
        """Of the step that was computed last, whose requests lie in the batch's order."""
        batch = self._batch
        counts = np.array([num_scheduled[name] for name in batch.req_ids])
        rows = np.repeat(np.arange(len(counts)), counts)
        ends = np.cumsum(counts)
        begun = batch.num_computed_tokens_cpu[: len(counts)]
        positions = np.arange(len(rows)) - np.repeat(ends - counts - begun, counts)
        found = self._capturer.snapshot_routing_data(len(rows)).cpu()
        self._kept[torch.from_numpy(self._slots(rows, positions))] = found.to(self._kept.dtype)

    def _slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places in the cache of tokens of the batch."""
        blocks = self._batch.block_table[0]
        table, size = blocks.get_numpy_array(), blocks.block_size
        slots: NDArray[np.int64] = table[rows, positions // size].astype(np.int64) * size + positions % size
        return slots

    def of(self, name: str, num_tokens: int) -> Tensor:
        """The experts of a request that took part in the last step, as `Rollout.routed_experts` has them.

        Args:
            name: vLLM's own of the request.
            num_tokens: Of its prompt and response, as far as mrl keeps it.

        Raises:
            RuntimeError: A token has none, or one that the model does not have.
        """
        row = self._batch.req_id_to_index.get(name)
        if row is None:
            raise RuntimeError(f"vLLM {self._version} has dropped the request whose experts are asked for")
        positions = np.arange(num_tokens - 1)  # the last was sampled, and is not read
        known = self._kept[torch.from_numpy(self._slots(np.full_like(positions, row), positions))]
        if known.numel() and not 0 <= int(known.min()) <= int(known.max()) < self._num_experts:
            raise RuntimeError(
                f"vLLM {self._version} told experts {int(known.min())} to {int(known.max())} of {self._num_experts}"
            )
        return torch.cat([known, known.new_full((1, *self._shape), -1)])
