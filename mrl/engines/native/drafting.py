"""Speculative decoding of one engine: the parts that all calls share, and the forward that verifies drafts.

Only compiled operations and packed products draft: with these the bits of a token do not depend on how many others are
in the step.

Shapes: P fed tokens, V vocabulary, L layers, K experts of a token.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mrl.algorithms.functional.sampling import truncates
from mrl.engines.base import EngineSpec, SamplingConfig
from mrl.engines.native.cpu_ops import Compiled
from mrl.engines.native.decode_cost_model import ASSUMED, Costs, costs, from_stored
from mrl.engines.native.decode_state import DecodeState
from mrl.engines.native.kv_cache import KVCache
from mrl.engines.native.model import Decoder
from mrl.engines.native.ngram_history import History
from mrl.engines.native.packed_linear import packs
from mrl.engines.native.sampler import TokenSampler
from mrl.engines.native.speculation import Drafted, Speculation

NOT_HERE = (
    "rollout.speculative has no effect: only compiled operations and packed products on a CPU guarantee that tokens "
    "stay the same"
)


class Drafting:
    """Speculative decoding of one engine.

    Args:
        spec: Constructor argument of the engine.
        model: Decoder of the engine.
        cache: KV cache of the engine.
        operations: Compiled operations of the engine.
    """

    def __init__(self, spec: EngineSpec, model: Decoder, cache: KVCache, operations: Compiled) -> None:
        self._spec = spec
        self._model = model
        self._cache = cache
        self._operations = operations
        self._costs: dict[str, Costs] = {}

    @staticmethod
    def create_if_supported(spec: EngineSpec, model: Decoder, cache: KVCache) -> Drafting | None:
        """Returns the object, or None if speculation is off or would change bits."""
        operations = model.operations
        if spec.arch.linear_attention is not None:  # its state cannot be taken back
            return None
        if spec.config.speculative.method is None or not packs(spec.device) or not isinstance(operations, Compiled):
            return None
        return Drafting(spec, model, cache, operations)

    def call(self, sampling: SamplingConfig, num_rows: int, rows: DecodeState, *, measured: bool) -> Speculation:
        """Returns the speculation state of one call.

        Args:
            sampling: Sampling distribution of the call.
            num_rows: Sequences that run at a time.
            rows: Decode state of the sequences.
            measured: Use costs measured on this machine; False: `ASSUMED`.
        """
        history = History(num_rows, self._cache.num_rows, self._cache.row_len)
        found = self._measured(sampling) if measured else from_stored(ASSUMED, self._most)
        forward = partial(self._forward, rows)
        return Speculation(self._spec.config.speculative, self._operations, history, found, num_rows, forward)

    @property
    def _most(self) -> int:
        """Most tokens of a step."""
        return max(self._spec.config.max_num_batched_tokens, self._spec.config.max_num_seqs)

    def _measured(self, sampling: SamplingConfig) -> Costs:
        """Returns the measured costs; uses the current weights, whose values do not affect time."""
        config, model = self._spec.config, self._model
        cut = truncates(sampling.top_k, sampling.top_p, sampling.min_p)
        parts = (config.tensor_model_parallel_size, config.expert_parallel_size)
        what = f"{self._spec.arch} {model.dtype} in {parts}, {'cut' if cut else 'whole'}"
        if what not in self._costs:
            sampler = TokenSampler(replace(sampling, return_kept_tokens=False), self._operations)

            def step(num_rows: int) -> None:
                keys_N = torch.arange(num_rows)
                sampler.sample(model.own_work(num_rows), keys_N, keys_N)

            self._costs[what] = costs(what, step, model.own_attention, self._most)
        return self._costs[what]

    def _forward(self, rows: DecodeState, drafted: Drafted) -> tuple[Tensor, Tensor | None]:
        """Returns logits [P, V] after each token, and the routing record [P, L, K] or None."""
        tokens_P, firsts_B = torch.from_numpy(drafted.tokens_P), torch.from_numpy(drafted.firsts_B)
        positions_P = rows.positions_S[torch.from_numpy(drafted.rows_P)] + torch.from_numpy(drafted.offsets_P)
        routed_PLK = None
        if rows.routed_SLK is not None:
            routed_PLK = rows.routed_SLK.new_empty(tokens_P.numel(), *rows.routed_SLK.shape[1:])
        attention = self._operations.verify_attention(self._cache, positions_P, firsts_B, self._model.num_heads)
        hidden_PH = self._model.forward(tokens_P, positions_P, attention, routed_PLK=routed_PLK)
        return self._model.logits(hidden_PH), routed_PLK
