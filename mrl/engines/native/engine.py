"""Native engine: generates on the training ranks themselves, in plain PyTorch.

This module manages weights and memory. Generation: `generation` (the loop), `multiturn` (episodes),
`streaming_generation`, `scheduler`, `paused_sequences`, `decode_state`, `kv_cache`, `model`, `attention`,
`latent_attention`, `sampler`, `stopping`, `cuda_graphs`. Speculative decoding: `drafting`, `speculation`,
`ngram_history`, `decode_cost_model`.

On a CPU it is tested against transformers. On CUDA the same code runs, with CUDA graphs for decoding unless
`rollout.enforce_eager`; that path has not been run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from mrl.config.config import LoraConfig
from mrl.engines._abort_check import AbortCheck
from mrl.engines._adapters import EngineAdapters
from mrl.engines._kv_budget import kv_budget
from mrl.engines._multiturn_base import MultiTurnClient
from mrl.engines._prompt_checks import check_prompts
from mrl.engines._work_queue import WorkQueue
from mrl.engines.base import EngineSpec, RolloutEngine, SamplingConfig
from mrl.engines.native.cpu_ops import operations
from mrl.engines.native.cuda_graphs import DecodeGraphs
from mrl.engines.native.decode_state import DecodeState, routing_format
from mrl.engines.native.drafting import NOT_HERE, Drafting
from mrl.engines.native.experts import FindAdapters
from mrl.engines.native.fp8_scales import Scales
from mrl.engines.native.generation import Generation
from mrl.engines.native.linear_attention import decode_states
from mrl.engines.native.model import Decoder
from mrl.engines.native.multiturn import MultiTurnGeneration, pool_rows
from mrl.engines.native.ngram_history import History
from mrl.engines.native.packed_linear import LinearAdapters, adapters_of_rows, compute_dtype
from mrl.engines.native.paused_sequences import PausedSequences
from mrl.engines.native.releasable_memory import MemoryRange, tensors_in_range
from mrl.engines.native.scheduler import Scheduler
from mrl.engines.native.stopping import Stopping
from mrl.engines.native.streaming_generation import StreamingGeneration
from mrl.errors import UserError
from mrl.resharding.checksum import MODULUS, bit_sum
from mrl.resharding.dtypes import DTYPES, allocate
from mrl.resharding.fp8 import SCALES, Grids, block_grids, fp8_layout, is_quantized, scale_indices, scale_tables
from mrl.resharding.layout import Layout
from mrl.resharding.lora import adapter_layout, engine_matrices, scale_of
from mrl.resharding.native import native_layout
from mrl.resharding.weight_slice import WeightSlice
from mrl.types import PartialRollout, Prompt, Rollout

Loop = TypeVar("Loop", bound=Generation)


class NativeEngine(RolloutEngine):
    """One rank of a native engine; activations and cache have `packed_linear.compute_dtype` of `spec.dtype`."""

    def __init__(self, spec: EngineSpec) -> None:
        """Collective over the job: creates this rank's part of an engine replica, without weights.

        Args:
            spec: `spec.dtype` is torch.float32 or torch.bfloat16; with `rollout.quantization` the dtype of the
                unquantized tensors.

        Raises:
            UserError: The ranks of the replica cannot share the model.
        """
        super().__init__(spec)
        config, arch, device, tp_group = spec.config, spec.arch, spec.device, spec.tp_group
        if config.true_on_policy and arch.mla is not None:
            raise UserError(
                f"rollout.true_on_policy=true with a model of latent attention ({arch.family}): the engine multiplies "
                "by kv_b_proj after attention and the actor before it, so their log-probabilities differ in the last "
                "bits. Set rollout.true_on_policy=false."
            )
        tp_size = 1 if tp_group is None else dist.get_world_size(tp_group)
        tp_rank = 0 if tp_group is None else dist.get_rank(tp_group)
        ep_size = config.expert_parallel_size
        grids = block_grids(arch, config.quantization)
        own = fp8_layout(native_layout(arch, tp_size, tp_rank, spec.dtype_name, ep_size=ep_size), grids)
        self._layout = {**own, **scale_tables(own, grids)}
        stored_as = [(stored.shape, DTYPES[stored.dtype]) for stored in self._layout.values()]
        self._stored, tensors = tensors_in_range(stored_as, device)
        self._weights = dict(zip(self._layout, tensors, strict=True))
        dtype, exact = compute_dtype(spec.dtype, device, exact=config.true_on_policy), config.true_on_policy
        between, problem = operations(dtype, device, eager=config.enforce_eager, exact=exact)
        if problem is not None:
            self.notes = (f"the native engine uses PyTorch's operators, slower than compiled ones: {problem}",)
        self._model = Decoder(
            arch,
            {name: self._weights[name] for name in own},
            tp_group=tp_group,
            max_positions=spec.max_len,
            ep_size=ep_size,
            scales=self._scales(own, grids),
            operations=between,
            exact=exact,
            adapters=None if spec.lora is None else self._add_adapters(spec.lora, own),
        )
        later_bytes = self._model.later_bytes(config.max_num_batched_tokens)
        if device.type == "cpu":  # on a CPU, pages of zeros are allocated when they are first written
            later_bytes += sum(weight.nbytes for weight in self._weights.values())
        self._cache = self._model.kv_cache(
            kv_budget(device, config.gpu_memory_utilization, tp_group, later_bytes=later_bytes)
        )
        self._copies = self._place_copies()
        self._drafting = Drafting.create_if_supported(spec, self._model, self._cache)
        if config.speculative.method is not None and self._drafting is None:
            self.notes += (NOT_HERE,)
        self._rows: DecodeState | None = None
        self._graphs: DecodeGraphs | None = None
        if device.type == "cuda" and self._model.is_capturable and not config.enforce_eager:
            self._graphs = DecodeGraphs(self._decode_eagerly)
        self.notes += tuple(self._slow_decoding())
        self._captured_before = 0
        self._stats: dict[str, float] = {}

    def _slow_decoding(self) -> Iterator[str]:
        """Yields notes about decoding that is slower than it could be."""
        if self._stored.problem is not None:
            yield f"the native engine captures CUDA graphs in every step: {self._stored.problem}"
        if self.spec.device.type == "cuda" and self.spec.arch.linear_attention is not None:
            yield "the native engine computes linear attention without CUDA graphs"
        if self.spec.device.type == "cuda" and self._model.has_expert_adapters:
            yield (
                "the native engine computes each expert by itself and without CUDA graphs, as experts have adapters "
                "beside their weights; actor.lora.merge=true is faster"
            )

    def _add_adapters(self, lora: LoraConfig, own: Layout) -> FindAdapters:
        """Allocates low-rank adapters of the weights, all zero; returns a function that finds those of a product."""
        matrices = engine_matrices(self.spec.arch, own, lora, self.spec.dtype_name)
        layout = adapter_layout(matrices)
        tensors = {name: tensor.zero_() for name, tensor in allocate(layout, self.spec.device).items()}
        self.adapters = EngineAdapters(self, layout, tensors)
        by_weight, scale = {matrix.weight: matrix for matrix in matrices}, scale_of(lora)

        def find(name: str, first: int, last: int) -> LinearAdapters | None:
            matrix = by_weight.get(name)
            return None if matrix is None else adapters_of_rows(matrix, tensors, scale, first, last)

        return find

    def _scales(self, own: Layout, grids: Grids) -> dict[str, Scales]:
        """Returns the scales of the weights that are stored in FP8."""
        device = self.spec.device
        return {
            name: Scales(
                self._weights[f"{name}{SCALES}"], *(index.to(device) for index in scale_indices(stored, grids))
            )
            for name, stored in own.items()
            if is_quantized(stored, grids)
        }

    def _place_copies(self) -> MemoryRange:
        """Allocates copies of weights in another dtype (such as of FP8) at fixed addresses; returns their memory."""
        copied = self._model.copied
        memory, copies = tensors_in_range([each.copy for each in copied if each.copy], self.spec.device)
        for linear, copy in zip(copied, copies, strict=True):
            linear.copy_into(copy)
        return memory

    # weights ----------------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """Returns which elements of which Hugging Face tensors this rank stores, and where."""
        return self._layout

    def begin_update(self) -> None:
        """Starts a weight update; `generate` raises until `finish_update`. No prefix is cached between calls."""
        self._has_weights = False
        for memory in (self._stored, self._copies):
            memory.take(memory.num_bytes)

    def update_weights(self, bucket: Sequence[WeightSlice]) -> None:
        """Copies a bucket of slices into the stored tensors.

        Raises:
            RuntimeError: No update is open, or a slice does not fit its tensor.
        """
        self._check_updating()
        for item in bucket:
            stored = self._weights.get(item.name)
            if stored is None:
                raise RuntimeError(f"'{item.name}' is not a tensor of the engine")
            item.write_to(stored)

    def checksum(self) -> int:
        """Returns the sum modulo 2**64 over the bit patterns of all stored elements."""
        return sum(bit_sum(tensor) for tensor in self._weights.values()) % MODULUS

    def finish_update(self, policy_version: int) -> None:
        """Ends the weight update and allows `generate` with `policy_version`."""
        self._model.refresh()
        self.policy_version = policy_version
        self._has_weights = True

    # memory -----------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Frees the KV cache until `wake`; the weights stay."""
        self._drop_cache()
        self._asleep = True

    def wake(self) -> None:
        """Allows `generate`, which allocates the KV cache in the shape that its prompts need."""
        self._asleep = False

    def release(self) -> None:
        """Frees the memory of stored weights and their copies; the tensors stay, and must not be read."""
        self._drop_cache()
        self._has_weights = False
        self.policy_version = -1
        self._model.free_copies()
        for memory in (self._stored, self._copies):
            memory.release()

    def close(self) -> None:
        """Frees all memory; the engine cannot be used again."""
        self._graphs = None
        self.sleep()
        self.release()
        self._weights.clear()
        self._model.release()

    def stats(self) -> dict[str, float]:
        """Returns statistics of the last `generate`.

        prefill_tokens, prefill_s, decode_tokens, decode_steps, decode_s, max_running, kv_cache_bytes, captured_graphs.
        """
        return dict(self._stats)

    def _drop_cache(self) -> None:
        """Frees the memory of cache and decode state; captured graphs stay valid, since addresses do not change."""
        if self._rows is not None:
            self._rows.sleep()
        self._cache.free()

    # generation -------------------------------------------------------------------------------------------------------

    def _generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        return self._run(prompts, sampling, None)

    def generate_multi_turn(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, client: MultiTurnClient
    ) -> list[Rollout]:
        """Generates multi-turn episodes; other sequences decode while one waits for a reply (`multiturn`).

        Raises:
            RuntimeError: See `generate`; or a reply does not fit.
            UserError: See `generate`.
        """
        self._check_ready()
        return self._run(prompts, sampling, client) if prompts else []

    def generate_streaming(self, work_queue: WorkQueue, sampling: SamplingConfig) -> list[PartialRollout]:
        """Samples work from a queue; can pause and resume between any two tokens (`streaming_generation`).

        Raises:
            RuntimeError: See `generate`; or a partial rollout is invalid, or needs a routing record.
            UserError: See `generate`.
        """
        self._check_ready()
        config = self.spec.config
        longest = min(config.longest_prompt + sampling.max_tokens, self.spec.max_len)
        limit = min(config.max_num_seqs, config.max_num_batched_tokens, work_queue.max_samples)
        num_rows = self._reserve(limit, longest, sampling.max_tokens, limit)

        def check(prompts: Sequence[Prompt], room: int) -> None:
            check_prompts(prompts, self.spec, replace(sampling, max_tokens=room), longest=longest - room)

        try:
            kind = partial(StreamingGeneration, work_queue, check)
            stream = self._generation(kind, (), sampling, num_rows, min(limit, num_rows))
            begun = stream.run_until_stopped(self.policy_version)
        except (RuntimeError, UserError):
            self._drop_cache()
            raise
        self._stats = self._statistics(stream)
        return begun

    def _run(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, client: MultiTurnClient | None
    ) -> list[Rollout]:
        check_prompts(prompts, self.spec, sampling)
        config = self.spec.config
        limit = min(config.max_num_seqs, config.max_num_batched_tokens, len(prompts) * sampling.n)
        longest = max(len(prompt.prompt_ids) for prompt in prompts) + sampling.max_tokens
        wanted = limit
        if client is not None:
            wanted = pool_rows(limit, len(prompts), sampling.n, self._cache.fitting(longest))
        num_rows = self._reserve(wanted, longest, sampling.max_tokens, limit)
        try:
            kind = Generation if client is None else partial(MultiTurnGeneration, client)
            running, measured = min(limit, num_rows), client is None
            generation = self._generation(kind, prompts, sampling, num_rows, running, measured=measured)
            rollouts = generation.run(self.policy_version)
        except (RuntimeError, UserError):
            self._drop_cache()  # NaNs must not stay in masked slots for the next call
            raise
        self._stats = self._statistics(generation)
        return rollouts

    def _statistics(self, generation: Generation) -> dict[str, float]:
        captured = 0 if self._graphs is None else self._graphs.num_captures - self._captured_before
        more = {"kv_cache_bytes": self._cache.allocated_bytes, "captured_graphs": captured}
        return generation.stats | {name: float(value) for name, value in more.items()}

    def _generation(
        self,
        kind: Callable[..., Loop],
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        num_rows: int,
        running: int,
        *,
        measured: bool = False,
    ) -> Loop:
        """Creates the loop of a call, in which `running` of `num_rows` rows decode; `measured`: see `Drafting.call`."""
        config, drafts, rows = self.spec.config, self._drafting, self._reserved
        return kind(
            sampling=replace(sampling, return_kept_tokens=sampling.return_kept_tokens and self.spec.leads_replica),
            model=self._model,
            cache=self._cache,
            rows=rows,
            decode_step=self._graphs.run if self._graphs is not None else self._decode_eagerly,
            scheduler=Scheduler(
                prompts,
                sampling.n,
                running,
                room=sampling.max_tokens,
                share_prefill=config.enable_prefix_caching,
                keeps_prompts=not self._cache.wraps and self.spec.arch.linear_attention is None,
                parking=PausedSequences(num_rows),
            ),
            stopping=Stopping(sampling, self.spec.decode, self.spec.device),
            max_prefill_tokens=config.max_num_batched_tokens,
            abandoned=AbortCheck(self.abort_requested, self.spec.tp_group, self.on_forward),
            on_sampled=self.on_sampled,
            speculation=None if drafts is None else drafts.call(sampling, running, rows, measured=measured),
        )

    def _reserve(self, wanted_rows: int, row_len: int, max_tokens: int, limit: int) -> int:
        """Allocates cache and decode state for a call, in the shape of earlier calls if that is large enough.

        Args:
            wanted_rows: Most sequences that can have a row.
            row_len: Longest sequence, tokens.
            max_tokens: Longest response, tokens.
            limit: Most rows that decode at a time.

        Returns:
            Number of rows that the call may use.
        """
        record = routing_format(self.spec.arch, self.spec.config)
        token_bytes = (record.token_bytes if record else 0) + (History.token_bytes() if self._drafting else 0)
        num_rows = self._cache.reserve(wanted_rows, row_len, row_len * token_bytes)
        before = (0, 0) if self._rows is None else self._rows.shape
        if self._rows is None or self._cache.num_rows > before[0] or max_tokens > before[1]:
            self._rows = None  # frees its memory before the new allocation
            self._rows = DecodeState(self._cache.num_rows, max(max_tokens, before[1]), self.spec.device, record)
        self._rows.wake()
        if self._graphs is not None:
            read = tuple(tensor.data_ptr() for tensor in self._model.reads)
            place = (self._cache.addresses, self._rows.addresses, read)
            self._graphs.begin(place, min(limit, num_rows), self._cache.row_len)
            self._captured_before = self._graphs.num_captures
        return num_rows

    @property
    def _reserved(self) -> DecodeState:
        if self._rows is None:
            raise RuntimeError("no rows are reserved")
        return self._rows

    def _decode_eagerly(self, batch: int, length: int) -> Tensor:
        """Returns logits after the newest token of the first `batch` rows; attention reads `length` slots."""
        rows = self._reserved
        positions_B, tokens_B = rows.positions_S[:batch], rows.tokens_S[:batch]
        routed_BLK = None if rows.routed_SLK is None else rows.routed_SLK[:batch]
        decode_attention = self._model.operations.decode_attention
        attention = decode_attention(self._cache, positions_B, length, self._model.num_heads)
        states = decode_states(self._cache, batch)
        hidden_BH = self._model.forward(tokens_B, positions_B, attention, routed_PLK=routed_BLK, states=states)
        rows.record_routing(batch)
        return self._model.logits(hidden_BH)
