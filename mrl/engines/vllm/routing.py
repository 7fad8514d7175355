"""Routing record of vLLM: the experts of each token, for `rollout.enable_rollout_routing_replay`.

vLLM's `enable_return_routed_experts` exists only in its newer model runner; the hooks that it uses
(`RoutedExpertsCapturer`, on each layer's router) work in every runner and inside CUDA graphs. A token's experts are
stored at the block and slot of its KV cache entry. So a cached prefix has its experts too, chunked prompts and
preempted requests need no special case, and dropped cache entries are never read again. For vLLM 0.32.
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
from mrl.resharding.dtypes import expert_index_dtype

CAPTURER = "vllm.model_executor.layers.fused_moe.routed_experts_capturer"


class VllmRoutingRecorder:
    """Experts of every token in the KV cache."""

    def __init__(self, arch: ArchSpec, moe: MoeSpec, version: str) -> None:
        """Creates a recorder without storage; `attach` allocates it.

        Args:
            arch: Sizes of the model.
            moe: MoE sizes of the model.
            version: Version of vLLM, for messages.
        """
        self._layers = torch.tensor(arch.moe_layers)
        self._shape = (len(arch.moe_layers), moe.top_k)
        self._recorded = (arch.num_layers, moe.top_k)
        self._num_experts = moe.num_experts
        self._version = version

    def attach(self, runner: Any, cache: Any) -> None:
        """Hooks into the routers of a model runner; must precede the capture of its graphs.

        Args:
            runner: vLLM's model runner, with its model loaded.
            cache: vLLM's `KVCacheConfig`.

        Raises:
            UserError: A router has no hook, or the model differs from mrl's.
        """
        from vllm.model_executor.layers.fused_moe import routed_experts_capturer as vllm

        if len(cache.kv_cache_groups) != 1:
            raise self._refusal(f"it has {len(cache.kv_cache_groups)} kinds of KV cache")
        self._capturer = vllm.RoutedExpertsCapturer(runner.max_num_tokens, runner.vllm_config)
        if self._capturer.shape_per_token != self._recorded:
            raise self._refusal(f"it records {self._capturer.shape_per_token} per token, expected {self._recorded}")
        try:
            vllm.bind_routed_experts_capturer(runner.get_model(), self._capturer)
        except ValueError as error:
            raise self._refusal(str(error)) from error
        num_slots = cache.num_blocks * cache.kv_cache_groups[0].kv_cache_spec.block_size
        self._kept = torch.full((num_slots, *self._shape), -1, dtype=expert_index_dtype(self._num_experts))
        self._batch = runner.input_batch
        bookkeeping = runner._bookkeeping_sync  # called after each forward, before the batch changes

        def keep(scheduled: Any, *rest: Any) -> Any:
            self._batch = runner.input_batch
            self._keep(scheduled.num_scheduled_tokens)
            return bookkeeping(scheduled, *rest)

        runner._bookkeeping_sync = keep

    def _refusal(self, why: str) -> UserError:
        return UserError(
            f"rollout.enable_rollout_routing_replay=true: vLLM {self._version} cannot report its experts: {why}. Set "
            "it to false, and actor.router_replay=recompute with algorithm.rollout_correction.bypass_mode=false. "
            f"{INSTALL}"
        )

    def _keep(self, num_scheduled: dict[str, int]) -> None:
        """Stores the experts of the last step, whose requests are in the batch's order."""
        batch = self._batch
        counts = np.array([num_scheduled[name] for name in batch.req_ids])
        rows = np.repeat(np.arange(len(counts)), counts)
        ends = np.cumsum(counts)
        begun = batch.num_computed_tokens_cpu[: len(counts)]
        positions = np.arange(len(rows)) - np.repeat(ends - counts - begun, counts)
        found = self._capturer.snapshot_routing_data(len(rows)).cpu()[:, self._layers]
        self._kept[torch.from_numpy(self._slots(rows, positions))] = found.to(self._kept.dtype)

    def _slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the cache slots of tokens of the batch."""
        blocks = self._batch.block_table[0]
        table, size = blocks.get_numpy_array(), blocks.block_size
        slots: NDArray[np.int64] = table[rows, positions // size].astype(np.int64) * size + positions % size
        return slots

    def of(self, name: str, num_tokens: int) -> Tensor:
        """Returns the experts of a request that took part in the last step, see `Rollout.routed_experts`.

        Args:
            name: vLLM's internal name of the request.
            num_tokens: Tokens of its prompt and (cut) response.

        Raises:
            RuntimeError: A token has no experts, or invalid ones.
        """
        row = self._batch.req_id_to_index.get(name)
        if row is None:
            raise RuntimeError(f"vLLM {self._version} dropped request {name} before its experts were read")
        positions = np.arange(num_tokens - 1)  # the last token was sampled and never fed
        known = self._kept[torch.from_numpy(self._slots(np.full_like(positions, row), positions))]
        if known.numel() and not 0 <= int(known.min()) <= int(known.max()) < self._num_experts:
            raise RuntimeError(
                f"vLLM {self._version} reported experts {int(known.min())} to {int(known.max())} of {self._num_experts}"
            )
        return torch.cat([known, known.new_full((1, *self._shape), -1)])
