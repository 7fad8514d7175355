"""The embedded engine: generates on the training ranks themselves, in plain PyTorch.

Owns the engine's life: weights that are replaced in place, and the KV cache that sleeps and wakes. The parts are one
noun each: `generation` (the loop), `sessions` (conversations in it), `streaming` (work as it comes), `scheduler` (who
runs where), `parking` (who waits where), `rows` (device state), `kv_cache`, `memory`, `model`, `attention`, `sampler`,
`stopping`, `cuda_graphs`; `drafting`, `speculation`, `history` and `costs` (tokens that are guessed and verified).

On CPU it is tested against transformers. On CUDA the same code runs, decoding through CUDA graphs unless
`rollout.enforce_eager`; that path has not been run on real hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.engines._feed import Feed
from mrl.engines._memory import kv_budget
from mrl.engines._poll import Poll
from mrl.engines._prompts import check_prompts
from mrl.engines._talk import Talk
from mrl.engines.base import EngineSpec, RolloutEngine, SamplingConfig, WeightSlice
from mrl.engines.native.compiled import operations
from mrl.engines.native.cuda_graphs import DecodeGraphs
from mrl.engines.native.drafting import NOT_HERE, Drafting
from mrl.engines.native.generation import Generation
from mrl.engines.native.history import History
from mrl.engines.native.kv_cache import KVCache
from mrl.engines.native.linear import compute_dtype
from mrl.engines.native.model import Decoder
from mrl.engines.native.parking import Parking
from mrl.engines.native.rows import Rows, record_of
from mrl.engines.native.scales import Scales
from mrl.engines.native.scheduler import Scheduler
from mrl.engines.native.sessions import Session, pool_rows
from mrl.engines.native.stopping import Stopping
from mrl.engines.native.streaming import Stream
from mrl.errors import UserError
from mrl.types import Begun, Prompt, Rollout
from mrl.weights.checksum import MODULUS, bit_sum
from mrl.weights.fp8 import SCALES, grids_of, in_fp8, is_quantized, scale_indices, scale_tables
from mrl.weights.layout import Layout
from mrl.weights.native import native_layout
from mrl.weights.tensors import DTYPES

Loop = TypeVar("Loop", bound=Generation)


class NativeEngine(RolloutEngine):
    """One rank of a replica; activations and cache have `linear.compute_dtype` of `spec.dtype`."""

    def __init__(self, spec: EngineSpec) -> None:
        """Collective over the job.

        Args:
            spec: Its dtype is torch.float32 or torch.bfloat16; with `rollout.quantization` of what is not quantised.

        Raises:
            UserError: The ranks of the replica cannot share the model.
        """
        super().__init__(spec)
        config, arch, device, tp_group = spec.config, spec.arch, spec.device, spec.tp_group
        tp_size = 1 if tp_group is None else dist.get_world_size(tp_group)
        tp_rank = 0 if tp_group is None else dist.get_rank(tp_group)
        ep_size = config.expert_parallel_size
        grids = grids_of(arch, config.quantization)
        own = in_fp8(native_layout(arch, tp_size, tp_rank, spec.dtype_name, ep_size=ep_size), grids)
        self._layout = {**own, **scale_tables(own, grids)}
        self._weights = {
            name: torch.zeros(stored.shape, dtype=DTYPES[stored.dtype], device=device)
            for name, stored in self._layout.items()
        }
        dtype, exact = compute_dtype(spec.dtype, device, exact=config.true_on_policy), config.true_on_policy
        between, problem = operations(dtype, device, eager=config.enforce_eager, exact=exact)
        if problem is not None:
            self.notes = (f"the native engine computes by PyTorch's operators, slower than compiled ones: {problem}",)
        self._model = Decoder(
            arch,
            {name: self._weights[name] for name in own},
            tp_group=tp_group,
            max_positions=spec.max_len,
            ep_size=ep_size,
            scales={
                name: Scales(
                    self._weights[f"{name}{SCALES}"], *(index.to(device) for index in scale_indices(stored, grids))
                )
                for name, stored in own.items()
                if is_quantized(stored, grids)
            },
            operations=between,
            exact=exact,
        )
        later_bytes = self._model.later_bytes(config.max_num_batched_tokens)
        if device.type == "cpu":  # a CPU gives zeros their memory when they are written
            later_bytes += sum(weight.nbytes for weight in self._weights.values())
        self._cache = KVCache(
            num_layers=arch.num_layers,
            num_kv_heads=self._model.num_kv_heads,
            head_dim=arch.head_dim,
            dtype=self._model.dtype,
            device=device,
            budget_bytes=kv_budget(device, config.gpu_memory_utilization, tp_group, later_bytes=later_bytes),
        )
        self._drafting = Drafting.found(spec, self._model, self._cache)
        if config.speculative.method is not None and self._drafting is None:
            self.notes += (NOT_HERE,)
        self._rows: Rows | None = None
        self._graphs: DecodeGraphs | None = None
        self._asleep = False
        self._whole = False
        self._stats: dict[str, float] = {}

    # weights ----------------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """What this rank stores, in Hugging Face coordinates."""
        return self._layout

    def begin_update(self) -> None:
        """From here until `finish_update` the engine refuses to generate. No prefix outlives a `generate`."""
        self._whole = False
        for weight in self._weights.values():
            if not weight.untyped_storage().size():  # released; a refit writes every element
                weight.untyped_storage().resize_(weight.nbytes)

    def update_weights(self, bucket: Sequence[WeightSlice]) -> None:
        """Copies a bucket into place.

        Raises:
            RuntimeError: No update was begun, or a slice does not fit what is stored.
        """
        if self._whole:
            raise RuntimeError("update_weights outside an update: call begin_update first")
        for item in bucket:
            stored = self._weights.get(item.name)
            if stored is None:
                raise RuntimeError(f"'{item.name}' is not a tensor of the engine")
            item.write_to(stored)

    def checksum(self) -> int:
        """Order-free 64-bit sum over the bit patterns of all stored elements."""
        return sum(bit_sum(tensor) for tensor in self._weights.values()) % MODULUS

    def finish_update(self, policy_version: int) -> None:
        """Declares the weights whole under the new version."""
        self._model.refresh()
        self.policy_version = policy_version
        self._whole = True

    # memory -----------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Frees the KV cache until `wake`; weights stay."""
        self._drop_cache()
        self._asleep = True

    def wake(self) -> None:
        """Lets the next `generate` allocate the KV cache, in the shape that its prompts need."""
        self._asleep = False

    def release(self) -> None:
        """Gives back stored weights and packed copies; the tensors stay, emptied."""
        self._drop_cache()
        self._whole = False
        self.policy_version = -1
        self._model.forget()
        for weight in self._weights.values():
            weight.untyped_storage().resize_(0)

    def close(self) -> None:
        """Releases everything; the engine cannot be used again."""
        self.sleep()
        self._whole = False
        self._weights.clear()
        self._model.release()

    def stats(self) -> dict[str, float]:
        """Of the last `generate`: prefill and decode tokens and seconds, decode_steps, max_running, kv_cache_bytes."""
        return dict(self._stats)

    def _drop_cache(self) -> None:
        self._graphs = None
        self._rows = None
        self._cache.free()

    # generation -------------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        """Collective over the replica: `sampling.n` rollouts of each prompt, ordered by prompt, then sample index.

        Raises:
            RuntimeError: The engine sleeps, its weights are not whole, or the model gives no distribution for a prompt.
            UserError: A prompt does not fit.
        """
        return self._run(prompts, sampling, None)

    def converse(self, prompts: Sequence[Prompt], sampling: SamplingConfig, talk: Talk) -> list[Rollout]:
        """See `RolloutEngine.converse`; here a sequence that waits holds up no other (`sessions`).

        Raises:
            RuntimeError: As `generate`, or an answer does not fit.
            UserError: As `generate`.
        """
        return self._run(prompts, sampling, talk)

    def stream(self, feed: Feed, sampling: SamplingConfig) -> list[Begun]:
        """See `RolloutEngine.stream`; here it may stop and go on between any two tokens (`streaming`).

        Raises:
            RuntimeError: As `generate`; or a begun sample cannot go on, or one cannot stop: experts are recorded.
            UserError: As `generate`.
        """
        self._check_ready()
        config = self.spec.config
        longest = min(config.longest_prompt + sampling.max_tokens, self.spec.max_len)
        limit = min(config.max_num_seqs, config.max_num_batched_tokens, feed.most)
        self._rows = self._reserve(limit, longest, sampling.max_tokens, limit)

        def check(prompts: Sequence[Prompt], room: int) -> None:
            check_prompts(prompts, self.spec, replace(sampling, max_tokens=room), longest=longest - room)

        try:
            kind = partial(Stream, feed, check)
            num_rows = min(limit, self._cache.num_rows)
            stream = self._generation(kind, (), sampling, num_rows, self._rows)
            begun = stream.until_stopped(self.policy_version)
        except (RuntimeError, UserError):
            self._drop_cache()
            raise
        self._stats = {**stream.stats, "kv_cache_bytes": float(self._cache.allocated_bytes)}
        return begun

    def _check_ready(self) -> None:
        if self._asleep:
            raise RuntimeError("the engine sleeps: call wake before generate")
        if not self._whole:
            raise RuntimeError("the engine's weights are not whole: no update was finished since the last begin_update")

    def _run(self, prompts: Sequence[Prompt], sampling: SamplingConfig, talk: Talk | None) -> list[Rollout]:
        self._check_ready()
        if not prompts:
            return []
        check_prompts(prompts, self.spec, sampling)
        config = self.spec.config
        limit = min(config.max_num_seqs, config.max_num_batched_tokens, len(prompts) * sampling.n)
        longest = max(len(prompt.prompt_ids) for prompt in prompts) + sampling.max_tokens
        wanted = limit
        if talk is not None:
            wanted = pool_rows(limit, len(prompts), sampling.n, self._cache.fitting(longest))
        self._rows = self._reserve(wanted, longest, sampling.max_tokens, limit)
        try:
            kind = Generation if talk is None else partial(Session, talk)
            num_rows, measured = min(limit, self._cache.num_rows), talk is None
            generation = self._generation(kind, prompts, sampling, num_rows, self._rows, measured=measured)
            rollouts = generation.run(self.policy_version)
        except (RuntimeError, UserError):
            self._drop_cache()  # what is not a number must not outlive the call in masked slots
            raise
        self._stats = {**generation.stats, "kv_cache_bytes": float(self._cache.allocated_bytes)}
        return rollouts

    def _generation(
        self,
        kind: Callable[..., Loop],
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        num_rows: int,
        rows: Rows,
        *,
        measured: bool = False,
    ) -> Loop:
        """`measured`: see `Drafting.call`."""
        config, drafts = self.spec.config, self._drafting
        return kind(
            sampling=replace(sampling, with_support=sampling.with_support and self.spec.leads_replica),
            model=self._model,
            cache=self._cache,
            rows=rows,
            decode_step=self._graphs.run if self._graphs is not None else self._decode_eagerly,
            scheduler=Scheduler(
                prompts,
                sampling.n,
                num_rows,
                room=sampling.max_tokens,
                share_prefill=config.enable_prefix_caching,
                parking=Parking(self._cache.num_rows),
            ),
            stopping=Stopping(sampling, self.spec.decode, self.spec.device),
            max_prefill_tokens=config.max_num_batched_tokens,
            abandoned=Poll(self.told_to_stop, self.spec.tp_group, self.sampled),
            speculation=None if drafts is None else drafts.call(sampling, num_rows, rows, measured=measured),
        )

    def _reserve(self, wanted_rows: int, row_len: int, max_tokens: int, limit: int) -> Rows:
        """Cache and row state for the call, of whose rows `limit` decode; kept where the shape is the last call's."""
        before = (self._cache.num_rows, self._cache.row_len)
        record = record_of(self.spec.arch, self.spec.config)
        token_bytes = (record.token_bytes if record else 0) + (History.token_bytes() if self._drafting else 0)
        num_rows = self._cache.reserve(wanted_rows, row_len, row_len * token_bytes)
        rows = self._rows
        if rows is None or rows.shape != (num_rows, max_tokens) or before != (num_rows, self._cache.row_len):
            rows = Rows(num_rows, max_tokens, self.spec.device, record)
            self._graphs = None
        limit = min(limit, num_rows)
        if self._graphs is not None and self._graphs.num_rows != limit:
            self._graphs = None
        capture = self.spec.device.type == "cuda" and self._model.is_capturable and not self.spec.config.enforce_eager
        if self._graphs is None and capture:
            self._graphs = DecodeGraphs(self._decode_eagerly, limit, self._cache.row_len)
        return rows

    def _decode_eagerly(self, batch: int, length: int) -> Tensor:
        """Logits after the newest token of the first `batch` rows; attention reads `length` slots."""
        if self._rows is None:
            raise RuntimeError("no rows are reserved")
        rows = self._rows
        positions_B, tokens_B = rows.positions_S[:batch], rows.tokens_S[:batch]
        routed_BLK = None if rows.routed_SLK is None else rows.routed_SLK[:batch]
        decode_attention = self._model.operations.decode_attention
        attention = decode_attention(self._cache, positions_B, length, self._model.num_heads)
        hidden_BH = self._model.forward(tokens_B, positions_B, attention, routed_PLK=routed_BLK)
        rows.keep_routed(batch)
        return self._model.logits(hidden_BH)
