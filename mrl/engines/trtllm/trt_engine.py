"""The engine of `rollout.name=trtllm_engine`: engines built by tools/build_trtllm_engine.py, refitted in place.

Samples are rows of static batches, limited by `rollout.max_num_seqs`, `rollout.max_num_batched_tokens` and memory; a
batch ends with its longest row. `runner` wraps TensorRT-LLM's runtime, `refitter` replaces weights, and `scoring`
computes log-probabilities.

Ranks of a replica are in TensorRT-LLM's order: pipeline stage x tp_size + tensor-parallel rank. Tokens are known on the
first stage and log-probabilities on the last; both are broadcast to the replica.

Tested with a fake TensorRT-LLM only; it has not been run with the real package.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algorithms.functional.sampling import stream_key
from mrl.distributed.collectives import any_rank, broadcast_object, raise_on_all_ranks
from mrl.engines._kept_tokens import KeptTokens
from mrl.engines._kv_budget import kv_budget
from mrl.engines._prompt_checks import check_prompts
from mrl.engines.base import EngineSpec, RolloutEngine, SamplingConfig
from mrl.engines.trtllm.engine_dir import read_engine_folder
from mrl.engines.trtllm.logprob_probe import (
    TOLERANCE,
    TRUNCATED_PROBE,
    ProbeResponse,
    ProbeResult,
    Scores,
    identify_distribution,
    is_trained_on,
    needs_logits,
)
from mrl.engines.trtllm.mpi_env import import_without_engine
from mrl.engines.trtllm.refitter import EngineWeights
from mrl.engines.trtllm.replica import Replica
from mrl.engines.trtllm.replica_threads import run_on_all_ranks
from mrl.engines.trtllm.runner import BatchOutput, Runner
from mrl.engines.trtllm.scoring import check_raw, kept_steps, score_steps
from mrl.engines.trtllm.trt_rollouts import BatchRow, end_rows, to_rollouts
from mrl.errors import UserError
from mrl.resharding.layout import Layout
from mrl.resharding.trtllm import trtllm_layout
from mrl.resharding.weight_slice import WeightSlice
from mrl.types import Prompt, Rollout

PROMPTS = ((1,), (1, 2))
"""Prompts of the probe, of different lengths to verify the offsets of each row's log-probabilities."""


class BuiltEngine(RolloutEngine):
    """One rank of a replica of built engines."""

    def __init__(self, spec: EngineSpec) -> None:
        """Collective over the ranks that sample: loads the engine of this rank.

        Args:
            spec: Specification of the replica; validation has checked that its dtype is the engines'.

        Raises:
            UserError: TensorRT-LLM cannot run the engines, or they do not belong to the model.
        """
        super().__init__(spec)
        config, device = spec.config, spec.device
        if config.engine_dir is None:
            raise UserError("rollout.name=trtllm_engine needs rollout.engine_dir, a folder of built engines.")
        replica = Replica(spec.tp_group)
        folder = read_engine_folder(config.engine_dir)
        mapping, name = folder.config.mapping, spec.dtype_name
        if (mapping.world_size, folder.config.dtype) != (replica.size, name):
            raise UserError(
                f"rollout.engine_dir: the engines in '{folder.path}' have {mapping.world_size} ranks and dtype "
                f"{folder.config.dtype}, but the replica has {replica.size} ranks and dtype {name}."
            )
        self._mapping = mapping
        with self._together():
            self._runner = Runner(folder, replica=replica, device=device)
            layout = trtllm_layout(spec.arch, mapping, replica.rank, name)
            where = f"'{folder.path}/rank{replica.rank}.engine'"
            self._weights = EngineWeights(self._runner.engine, layout, device, where)
        self._budget = kv_budget(device, config.gpu_memory_utilization, spec.tp_group)
        self._verdict: ProbeResult | None = None
        self._greedy_is_exact = False
        self._asleep = False
        self._has_weights = False
        self._stats: dict[str, float] = {}

    @classmethod
    def start_without_engine(cls) -> None:
        """Imports TensorRT-LLM on a rank without an engine, where the import is collective over all ranks."""
        import_without_engine()

    # weights ----------------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """Returns the rank's tensors by TensorRT-LLM's names, in Hugging Face coordinates."""
        return self._weights.layout

    def begin_update(self) -> None:
        """Starts a weight update; until `finish_update` the engine refuses to generate. There is no prefix cache."""
        self._has_weights = False
        self._weights.begin()

    def update_weights(self, bucket: Sequence[WeightSlice]) -> None:
        """Copies a bucket into the buffers of the refit.

        Raises:
            RuntimeError: No update was started, or a slice does not fit.
        """
        self._weights.write(bucket)

    def checksum(self) -> int:
        """Returns an order-independent 64-bit sum over the bit patterns of all buffers of the refit."""
        return self._weights.checksum()

    def finish_update(self, policy_version: int) -> None:
        """Refits the engine in place and allows generation with `policy_version`.

        Raises:
            RuntimeError: TensorRT rejects the weights.
        """
        self._weights.commit()
        self.policy_version = policy_version
        self._has_weights = True

    # memory -----------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Frees the KV cache until `wake`.

        Weights and TensorRT's activation memory cannot leave the device while the engine is loaded, and reloading it in
        every step would read weights from disk only to replace them.
        """
        self._runner.release_cache()
        self._asleep = True

    def wake(self) -> None:
        """Allows the next `generate` to allocate the KV cache."""
        self._asleep = False

    def close(self) -> None:
        """Unloads the engine; it cannot be used again."""
        self._has_weights = False
        self._weights.discard()
        self._runner.close()

    def stats(self) -> dict[str, float]:
        """Returns batches, prefill_tokens, decode_tokens, generate_s and by_logits (0 or 1) of the last `generate`."""
        return dict(self._stats)

    # generation -------------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        """Collective over the replica: samples `sampling.n` rollouts per prompt, ordered by prompt, then sample index.

        Raises:
            RuntimeError: The engine sleeps, a weight update is incomplete, or a rank's runtime failed.
            UserError: A prompt does not fit, or there is not enough memory for a single row.
        """
        if self._asleep:
            raise RuntimeError("the engine sleeps: call wake() before generate()")
        if not self._has_weights:
            raise RuntimeError("weight update incomplete: call finish_update() before generate()")
        if not prompts:
            return []
        check_prompts(prompts, self.spec, sampling, longest=self.spec.config.prompt_length, chunked_prefill=False)
        began = time.perf_counter()
        by_logits = self._needs_logits(sampling)
        samples = [BatchRow(prompt, index) for prompt in prompts for index in range(sampling.n)]
        rollouts: list[Rollout] = []
        num_batches = 0
        for batch in self._batches(samples, sampling.max_tokens, by_logits):
            finished = self._run(batch, sampling, by_logits)
            rollouts += finished
            num_batches += 1
            self.on_sampled(sum(len(one.response_ids) for one in finished), [one.prompt.uid for one in finished])
            if self._stop_requested():
                break
        self._stats = {
            "batches": float(num_batches),
            "prefill_tokens": float(sum(len(sample.prompt.prompt_ids) for sample in samples)),
            "decode_tokens": float(sum(len(rollout.response_ids) for rollout in rollouts)),
            "generate_s": time.perf_counter() - began,
            "by_logits": float(by_logits),
        }
        return rollouts

    def _run(self, batch: Sequence[BatchRow], sampling: SamplingConfig, by_logits: bool) -> list[Rollout]:
        seeds = [stream_key(sampling.seed, sample.prompt.uid, sample.index) for sample in batch]
        prompts = [sample.prompt.prompt_ids for sample in batch]
        output, tokens_BT = self._call(prompts, sampling, seeds, by_logits)
        ends = end_rows(batch, tokens_BT.tolist(), sampling, self.spec.arch.vocab_size, self.spec.decode)
        lens = [end for end, _ in ends]
        logprobs_BT = self._share(self._logprobs(output, tokens_BT, lens, sampling), -1)
        rollouts = to_rollouts(batch, tokens_BT.tolist(), logprobs_BT.tolist(), ends, self.policy_version)
        if sampling.return_kept_tokens:
            shared = self._share(self._kept(output, tokens_BT, lens, sampling), -1)
            for rollout, state in zip(rollouts, shared, strict=True):
                KeptTokens.of(state).attach_to(rollout)
        return rollouts

    def _call(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, seeds: Sequence[int], with_logits: bool
    ) -> tuple[BatchOutput, Tensor]:
        """Collective over the replica: runs one batch; returns this rank's output and the tokens, int64 [B, T]."""
        output = run_on_all_ranks(
            lambda: self._runner.generate(prompts, sampling, seeds, with_logits=with_logits),
            self.spec.tp_group,
            self.spec.device,
        )
        tokens_BT: Tensor = self._share(None if output.tokens_BT is None else output.tokens_BT.long(), 0)
        return output, tokens_BT

    def _logprobs(
        self, output: BatchOutput, tokens_BT: Tensor, lens: Sequence[int], sampling: SamplingConfig
    ) -> Tensor | None:
        """Returns the log-probabilities, fp32 [B, T]; None on all but the last stage."""
        if output.logits is None:
            return output.decoder_logprobs_BT
        return score_steps(output.logits, tokens_BT, lens, self.spec.arch.vocab_size, sampling)

    def _kept(
        self, output: BatchOutput, tokens_BT: Tensor, lens: Sequence[int], sampling: SamplingConfig
    ) -> list[tuple[bytes, list[int], list[float]]] | None:
        """Returns the kept token ids of each row as `KeptTokens.state`; None on all but the last stage."""
        if output.logits is None:
            return None
        found = kept_steps(output.logits, tokens_BT, lens, self.spec.arch.vocab_size, sampling)
        return [kept.state for kept in found]

    def _batches(self, samples: Sequence[BatchRow], max_tokens: int, by_logits: bool) -> Iterator[Sequence[BatchRow]]:
        """Yields samples that run in one batch.

        Raises:
            UserError: There is not enough memory for a single row.
        """
        config, first = self.spec.config, 0
        while first < len(samples):
            stop, longest, num_tokens = first, 0, 0
            while stop < len(samples) and stop - first < config.max_num_seqs:
                length = len(samples[stop].prompt.prompt_ids)
                longest, num_tokens = max(longest, length), num_tokens + length
                row_bytes = self._row_bytes(longest + max_tokens, max_tokens if by_logits else 0)
                if num_tokens > config.max_num_batched_tokens or row_bytes * (stop + 1 - first) > self._budget:
                    break
                stop += 1
            if stop == first:
                raise UserError(
                    f"the KV cache of one sequence takes {row_bytes} bytes, and rollout.gpu_memory_utilization="
                    f"{config.gpu_memory_utilization} leaves {self._budget}. Raise it, or shorten the sequences."
                )
            yield samples[first:stop]
            first = stop

    def _row_bytes(self, length: int, num_logits: int) -> int:
        """Returns the bytes of one row: this rank's keys and values, and its logits twice, since they are stacked."""
        arch, mapping = self.spec.arch, self._mapping
        heads = max(1, arch.num_kv_heads // mapping.tp_size)
        cache = 2 * (arch.num_layers // mapping.pp_size) * heads * arch.head_dim * length * self.spec.dtype.itemsize
        return cache + 2 * 4 * num_logits * arch.vocab_size

    # probe of the decoder's log-probabilities -------------------------------------------------------------------------

    def _needs_logits(self, sampling: SamplingConfig) -> bool:
        """Collective over the replica: returns whether log-probabilities must be computed from every step's logits.

        Raises:
            UserError: They cannot be exact under these settings.
        """
        trained = self.spec.trains_on_logprobs and is_trained_on(sampling, self.spec.config)
        if not (trained or sampling.return_kept_tokens):
            return False
        if self._verdict is None or self._verdict.scores is Scores.UNKNOWN:  # may be recognised with other weights
            self._verdict, self._greedy_is_exact = self._probe(sampling.seed)
        return needs_logits(self._verdict, sampling, trained=trained) or (sampling.greedy and not self._greedy_is_exact)

    def _probe(self, seed: int) -> tuple[ProbeResult, bool]:
        """Collective over the replica: returns the probe's result, and whether greedy log-probabilities are exact.

        Raises:
            UserError: The returned logits are not the model's raw logits.
        """
        prompts = PROMPTS[: self.spec.config.max_num_seqs]
        max_tokens = min(TRUNCATED_PROBE.max_tokens, self.spec.max_len - max(map(len, prompts)))
        sampled = replace(TRUNCATED_PROBE, max_tokens=max_tokens, seed=seed)
        greedy = replace(sampled, greedy=True, temperature=2 * TRUNCATED_PROBE.temperature, top_p=1.0)
        seeds = list(range(len(prompts)))
        first, tokens_BT = self._call(prompts, sampled, seeds, True)
        second, greedy_BT = self._call(prompts, greedy, seeds, True)
        found: tuple[ProbeResult, bool] | None = None
        with self._together():
            reported, greedy_reported = first.decoder_logprobs_BT, second.decoder_logprobs_BT
            if first.logits and second.logits and reported is not None and greedy_reported is not None:
                check_raw(first.logits[0], second.logits[0])
                logits_BTV = torch.stack(first.logits, 1)[:, :, : self.spec.arch.vocab_size].cpu()
                rows = [
                    ProbeResponse(sampled, tokens.tolist(), logprobs.tolist(), logits_TV)
                    for logprobs, logits_TV, tokens in zip(reported, logits_BTV, tokens_BT, strict=True)
                ]
                lens = [max_tokens] * len(prompts)
                expected = score_steps(second.logits, greedy_BT, lens, self.spec.arch.vocab_size, greedy)
                is_exact = float((greedy_reported - expected).abs().max()) <= TOLERANCE
                found = (ProbeResult(identify_distribution(rows), has_logits=True), is_exact)
        shared: tuple[ProbeResult, bool] = self._share(found, -1)
        return shared

    # the replica ------------------------------------------------------------------------------------------------------

    def _together(self) -> AbstractContextManager[None]:
        return nullcontext() if self.spec.tp_group is None else raise_on_all_ranks(self.spec.tp_group)

    def _stop_requested(self) -> bool:
        """Collective over the replica: returns whether any rank received a stop request."""
        if self.spec.tp_group is None:
            return self.abort_requested()
        return any_rank(self.abort_requested(), self.spec.tp_group)

    def _share(self, value: Any, stage: int) -> Any:
        """Collective over the replica: broadcasts the value of the first rank of a pipeline stage, 0 or -1."""
        if self.spec.tp_group is None:
            return value
        position = 0 if stage == 0 else self._mapping.world_size - self._mapping.tp_size
        return broadcast_object(dist.get_global_rank(self.spec.tp_group, position), value, self.spec.tp_group)
