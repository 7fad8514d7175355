"""Drafts in one engine: what of it is the same for all calls, and the forward that verifies them.

Owns what a step is said to cost, and the step with drafts. Only compiled operations and packed products draft: of these
it is known that the bits of a token do not depend on how many others are in the step.

Shapes: P tokens that are fed, V vocabulary, L layers, K experts of a token.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mrl.algorithms.functional.sampling import truncates
from mrl.engines.base import EngineSpec, SamplingConfig
from mrl.engines.native.cpu_ops import Compiled
from mrl.engines.native.decode_cost_model import ASSUMED, Costs, costs, of
from mrl.engines.native.decode_state import Rows
from mrl.engines.native.kv_cache import KVCache
from mrl.engines.native.model import Decoder
from mrl.engines.native.ngram_history import History
from mrl.engines.native.packed_linear import packs
from mrl.engines.native.sampler import Sampler
from mrl.engines.native.speculation import Drafted, Speculation

NOT_HERE = (
    "rollout.speculative drafts nothing here: only for compiled operations and packed products, on a CPU, is it known "
    "that tokens stay the same"
)


class Drafting:
    """Of one engine.

    Args:
        spec: The engine's.
        model: Its forward.
        cache: Its keys and values.
        operations: Between products.
    """

    def __init__(self, spec: EngineSpec, model: Decoder, cache: KVCache, operations: Compiled) -> None:
        self._spec = spec
        self._model = model
        self._cache = cache
        self._operations = operations
        self._costs: dict[str, Costs] = {}

    @staticmethod
    def found(spec: EngineSpec, model: Decoder, cache: KVCache) -> Drafting | None:
        """None where nothing is to be drafted, or cannot be without a change of bits."""
        operations = model.operations
        if spec.config.speculative.method is None or not packs(spec.device) or not isinstance(operations, Compiled):
            return None
        return Drafting(spec, model, cache, operations)

    def call(self, sampling: SamplingConfig, num_rows: int, rows: Rows, *, measured: bool) -> Speculation:
        """Of one call.

        Args:
            sampling: What tokens are drawn from.
            num_rows: Sequences that run at a time.
            rows: Their state.
            measured: Whether costs may be those of this machine; else they are `ASSUMED`.
        """
        history = History(num_rows, self._cache.num_rows, self._cache.row_len)
        found = self._measured(sampling) if measured else of(ASSUMED, self._most)
        forward = partial(self._forward, rows)
        return Speculation(self._spec.config.speculative, self._operations, history, found, num_rows, forward)

    @property
    def _most(self) -> int:
        """Tokens of a step."""
        return max(self._spec.config.max_num_batched_tokens, self._spec.config.max_num_seqs)

    def _measured(self, sampling: SamplingConfig) -> Costs:
        """Measured once, with the weights of now, whose values do not matter."""
        config, model = self._spec.config, self._model
        cut = truncates(sampling.top_k, sampling.top_p, sampling.min_p)
        parts = (config.tensor_model_parallel_size, config.expert_parallel_size)
        what = f"{self._spec.arch} {model.dtype} in {parts}, {'cut' if cut else 'whole'}"
        if what not in self._costs:
            sampler = Sampler(replace(sampling, with_support=False), self._operations)

            def step(num_rows: int) -> None:
                keys_N = torch.arange(num_rows)
                sampler.sample(model.own_work(num_rows), keys_N, keys_N)

            self._costs[what] = costs(what, step, model.own_attention, self._most)
        return self._costs[what]

    def _forward(self, rows: Rows, drafted: Drafted) -> tuple[Tensor, Tensor | None]:
        """Logits [P, V] after each token, and the experts [P, L, K] that it went to, where they are recorded."""
        tokens_P, firsts_B = torch.from_numpy(drafted.tokens_P), torch.from_numpy(drafted.firsts_B)
        positions_P = rows.positions_S[torch.from_numpy(drafted.rows_P)] + torch.from_numpy(drafted.offsets_P)
        routed_PLK = None
        if rows.routed_SLK is not None:
            routed_PLK = rows.routed_SLK.new_empty(tokens_P.numel(), *rows.routed_SLK.shape[1:])
        attention = self._operations.verify_attention(self._cache, positions_P, firsts_B, self._model.num_heads)
        hidden_PH = self._model.forward(tokens_P, positions_P, attention, routed_PLK=routed_PLK)
        return self._model.logits(hidden_PH), routed_PLK
