"""The engine of `rollout.name=trtllm`: TensorRT-LLM's LLM API (PyTorch backend) in the training ranks' processes.

Weights and KV cache sleep and wake by memory tag. A weight sync runs inside TensorRT-LLM's `control_action` in the
order it requires: pre-reload, buckets of Hugging Face tensors, processing, prefix cache reset. TensorRT-LLM shards and
fuses the tensors itself, so it receives full-size tensors, of which only the parts that this rank's modules read were
sent (`weight_shard_map.py`). Each sample is one request.

This has not been run with the real TensorRT-LLM: it was written against the signatures in
tests/engines/trtllm/signatures.json, which name their sources. Properties of the installed package are checked at
start: features (`features.py`), the executor's location (`llm_runtime.py`), and what its log-probabilities score
(`logprob_probe.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from mrl.algorithms.functional.sampling import stream_key
from mrl.distributed import launch
from mrl.engines._fp8_support import quantization_config_keys
from mrl.engines._kept_tokens import KeptTokens, add_step
from mrl.engines._prompt_checks import check_prompts
from mrl.engines.base import EngineSpec, RolloutEngine, SamplingConfig
from mrl.engines.trtllm import fp8, logprob_probe
from mrl.engines.trtllm.llm_runtime import SETTINGS, LlmRuntime, check_min_p, describe_error
from mrl.engines.trtllm.logprob_probe import ProbeResult
from mrl.engines.trtllm.mpi_env import import_without_engine
from mrl.engines.trtllm.replica import Replica
from mrl.engines.trtllm.requests import Requests, requests_at_a_time
from mrl.engines.trtllm.sampling import arguments, experts_of, logits_of, logprobs_of, to_rollout
from mrl.engines.trtllm.weight_shard_map import WeightShardMap
from mrl.resharding.checksum import MODULUS
from mrl.resharding.layout import Layout
from mrl.resharding.weight_slice import WeightSlice
from mrl.types import Prompt, Rollout

MIB = 1 << 20

CLOSE_S, FAILED_CLOSE_S = 30.0, 2.0
"""Time limits for the event loop to end, seconds; after a failure it may be waiting for a rank that is gone."""


class LlmEngine(RolloutEngine):
    """One rank of a replica."""

    def __init__(self, spec: EngineSpec) -> None:
        """Collective over the ranks that sample: starts TensorRT-LLM in this process.

        Args:
            spec: Specification of the replica.

        Raises:
            UserError: TensorRT-LLM is not installed, or cannot start in this job.
        """
        super().__init__(spec)
        config, arch, device = spec.config, spec.arch, spec.device
        self._replica = Replica(spec.tp_group)
        self._bucket_bytes = config.checkpoint_engine.update_weights_bucket_megabytes * MIB
        self._runtime = LlmRuntime(
            config,
            arch,
            spec.write_model_folder(quantization_config_keys(config)),
            replica=self._replica,
            device=device,
            dtype=spec.dtype,
            timeout_s=spec.timeout_s,
            trains_on_logprobs=spec.trains_on_logprobs,
        )
        self._requests = Requests(self._runtime, spec)
        model = self._runtime.executor.model_engine.model
        self._in_parts = "allow_partial_loading" in inspect.signature(model.load_weights).parameters
        try:
            if config.quantization is not None:
                fp8.check_started(model, spec, self._replica.rank, graphs=self._runtime.graphs)
            self._shards = WeightShardMap(model, spec, self._replica.rank)
            if not self._in_parts and device.type == "cuda":
                weights = sum(weight.nbytes for weight in model.parameters())
                self._shards.check_staging(weights, torch.cuda.get_device_properties(device).total_memory)
        except Exception:
            self._runtime.close(wait_s=FAILED_CLOSE_S)
            raise
        self.notes = (*self._runtime.notes, *self._shards.notes)
        self._asleep: set[str] = set()
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._update: ExitStack | None = None
        self._assembler = self._shards.assembler()
        self._loaded_sum, self._num_buckets = 0, 0
        self._has_weights = False
        self._broken, self._failed = "", False
        self._verdict: ProbeResult | None = None
        self._stats: dict[str, float] = {}
        self._routed: list[Tensor] = []
        self._kept: list[KeptTokens] = []

    @classmethod
    def start_without_engine(cls) -> None:
        """Imports TensorRT-LLM on a rank without an engine, where the import is collective over all ranks."""
        import_without_engine()

    # weights ----------------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """Returns the part of each Hugging Face tensor that this rank reads, and complete scales of FP8 tensors."""
        return self._shards.layout

    def begin_update(self) -> None:
        """Pauses the engine after its last request, wakes its weights, and prepares its modules for loading.

        After a failed weight sync the engine stays unusable: TensorRT-LLM cannot recover from partly replaced weights.

        Raises:
            RuntimeError: TensorRT-LLM fails.
        """
        self._has_weights = False
        if self._update is not None:
            self._fail("a weight sync ended before all of its weights were loaded")
        if self._broken:
            self._end_update()
            return
        self._assembler = self._shards.assembler()
        self._loaded_sum, self._num_buckets = 0, 0
        update = ExitStack()
        self._update = update
        update.enter_context(launch.scrubbed_env(hide=(), given=SETTINGS))
        update.enter_context(self._runtime.paused())
        self._materialize(self._runtime.features.weight_tags)
        loader = self._runtime.executor.model_engine.model_loader
        if hasattr(loader, "begin_update_weights"):  # newer than 1.2
            loader.begin_update_weights()
        self._each_module("pre_reload_weights")

    def update_weights(self, bucket: Sequence[WeightSlice]) -> None:
        """Assembles tensors from regions, and loads complete tensors into TensorRT-LLM in buckets.

        Raises:
            RuntimeError: No update was started, a region does not fit, or TensorRT-LLM rejects a bucket.
        """
        if self._update is None:
            raise RuntimeError(self._broken or "update_weights outside an update: call begin_update first")
        for item in bucket:
            self._assembler.add([item])
            full = self._in_parts and self._assembler.ready_bytes >= self._bucket_bytes
            if self._assembler.ready and (full or self._assembler.is_complete):
                self._load()

    def checksum(self) -> int:
        """Returns the checksum of the tensors passed to `ModelLoader.reload`; the stored weights are not read back."""
        return self._loaded_sum % MODULUS

    def finish_update(self, policy_version: int) -> None:
        """Processes the loaded weights and allows generation with `policy_version`.

        Raises:
            RuntimeError: Tensors are missing, or TensorRT-LLM fails.
        """
        if self._update is None:
            raise RuntimeError(self._broken or "finish_update outside an update: call begin_update first")
        lacking = self._assembler.lacking
        if lacking:
            self._fail(f"{len(lacking)} tensors were not received; the first is '{lacking[0]}'")
            self._end_update()
            raise RuntimeError(self._broken)
        try:
            executor = self._runtime.executor
            loader = executor.model_engine.model_loader
            if hasattr(loader, "finalize_update_weights"):  # newer than 1.2
                loader.finalize_update_weights()
            self._each_module("process_weights_after_loading", "post_load_weights")
            self._shards.check()
            executor.reset_prefix_cache()
            self._synchronize()
        except Exception as error:
            self._fail(f"processing the loaded weights failed: {describe_error(error)}")
            raise RuntimeError(self._broken) from error
        finally:
            self._end_update()
        self.policy_version = policy_version
        self._has_weights = True

    def _load(self) -> None:
        """Loads the complete tensors; their buffers are freed when TensorRT-LLM has copied them."""
        tensors = self._assembler.take()
        self._num_buckets += 1
        model_engine = self._runtime.executor.model_engine
        parts: dict[str, Any] = {"allow_partial_loading": True} if self._in_parts else {}
        sums = sum(self._assembler.checksum(name, tensor) for name, tensor in tensors.items())
        try:
            model_engine.model_loader.reload(model_engine.model, {**tensors, **fp8.unit_scales(tensors)}, **parts)
            self._synchronize()
        except Exception as error:
            names = list(tensors)
            which = f"'{names[0]}'" if len(names) == 1 else f"'{names[0]}' to '{names[-1]}' ({len(names)} tensors)"
            self._fail(
                f"TensorRT-LLM rejected bucket {self._num_buckets} of the weight sync, {which}: {describe_error(error)}"
            )
            raise RuntimeError(self._broken) from error
        self._loaded_sum += sums

    def _each_module(self, *names: str) -> None:
        """Calls the named methods on every module that has them, module by module."""
        for module in self._runtime.executor.model_engine.model.modules():
            for name in names:
                if hasattr(module, name) and not getattr(module, "_weights_removed", False):
                    getattr(module, name)()

    def _fail(self, why: str) -> None:
        """Marks the engine as permanently unusable."""
        self._broken = self._broken or why

    def _end_update(self) -> None:
        if self._update is not None:
            update, self._update = self._update, None
            update.close()

    def _synchronize(self) -> None:
        if self.spec.device.type == "cuda":
            torch.cuda.synchronize(self.spec.device)

    # memory -----------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Frees the KV cache and offloads the weights until `wake`; no-op where `rollout.free_cache_engine` is false.

        The weights move to pinned host memory. Weights that would be discarded stay on the device until `release`.
        """
        features = self._runtime.features
        tags = {features.cache_tag, *features.weight_tags} - set(features.discarded_tags)
        self._dematerialize(tags)

    def release(self) -> None:
        """Discards the weights until the next weight sync, if the version can; otherwise they stay as after `sleep`.

        Parameters that no weight sync sends, such as scales of the KV cache, are saved in host memory.
        """
        tags = set(self._runtime.features.discarded_tags)
        if not self.spec.config.free_cache_engine or not tags - self._asleep:
            return
        self._has_weights, self.policy_version = False, -1
        self._saved = [(weight, weight.detach().to("cpu", copy=True)) for weight in self._shards.never_synced()]
        self._dematerialize(tags)

    def _dematerialize(self, tags: set[str]) -> None:
        """Releases the memory of the tags that are awake, in the reverse order of waking."""
        features = self._runtime.features
        ordered = [tag for tag in (features.cache_tag, *features.weight_tags[::-1]) if tag in tags - self._asleep]
        if not self.spec.config.free_cache_engine or not ordered:
            return
        from tensorrt_llm._torch import virtual_memory

        with self._runtime.paused():
            self._runtime.executor.reset_prefix_cache()  # its blocks do not survive
            self._synchronize()
            virtual_memory.release_with_tag(*ordered)
        self._asleep |= set(ordered)

    def wake(self) -> None:
        """Restores sleeping memory: first the weights, then the KV cache."""
        if self._asleep:
            with self._runtime.paused():
                self._materialize((*self._runtime.features.weight_tags, self._runtime.features.cache_tag))

    def _materialize(self, tags: Sequence[str]) -> None:
        """Restores the memory of the tags that sleep; must be called inside a pause."""
        tags = [tag for tag in tags if tag in self._asleep]
        if tags:
            from tensorrt_llm._torch import virtual_memory

            virtual_memory.materialize_with_tag(*tags)
            self._synchronize()
            self._asleep -= set(tags)
            if not self._asleep.intersection(self._runtime.features.discarded_tags):
                for weight, kept in self._saved:
                    weight.detach().copy_(kept)
                self._saved = []

    def close(self) -> None:
        """Shuts down TensorRT-LLM; the engine cannot be used again."""
        self._has_weights = False
        self._end_update()
        self._runtime.close(wait_s=FAILED_CLOSE_S if self._failed or self._broken else CLOSE_S)

    def stats(self) -> dict[str, float]:
        """Returns prefill_tokens (each prompt once per sample) and decode_tokens of the last `generate`."""
        return dict(self._stats)

    # generation -------------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        """Collective over the replica: samples `sampling.n` rollouts per prompt, ordered by prompt, then sample index.

        The first rank sends requests to TensorRT-LLM; the other ranks' parts of the engine work along, and receive its
        rollouts.

        Raises:
            RuntimeError: The engine sleeps, a weight update is incomplete, or the engine failed on any rank of the
                replica.
            UserError: A prompt does not fit, or the sampling settings are not supported.
        """
        if self._asleep:
            raise RuntimeError("the engine sleeps: call wake() before generate()")
        if not self._has_weights:
            why = self._broken or "call begin_update(), update_weights() and finish_update() before generate()"
            raise RuntimeError(f"weight update incomplete: {why}")
        if not prompts:
            return []
        check_min_p(self.spec.config, self._runtime.features, sampling.min_p)
        check_prompts(prompts, self.spec, sampling, longest=self.spec.config.longest_prompt)
        self._routed, self._kept = [], []
        stopped: list[Rollout] = []
        try:
            rollouts = self._replica.call(
                lambda: self._sample_on_leader(prompts, sampling),
                check=self._runtime.check,
                abort_requested=self.abort_requested,
                abort_result=stopped,
            )
        except RuntimeError:
            self._failed = True
            raise
        # These are filled on the first rank only, which is the one that passes samples on.
        for rollout, routed in zip(rollouts, self._routed, strict=False):
            rollout.routed_experts = routed
        for rollout, kept in zip(rollouts, self._kept, strict=False):
            kept.attach_to(rollout)
        self._stats = {
            "prefill_tokens": float(sum(len(rollout.prompt.prompt_ids) for rollout in rollouts)),
            "decode_tokens": float(sum(len(rollout.response_ids) for rollout in rollouts)),
        }
        return rollouts

    def _sample_on_leader(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig
    ) -> Generator[None, None, list[Rollout]]:
        """Sends every sample as a request on the first rank, limited in number where logits are returned."""
        if self._verdict is None:
            self._verdict = yield from self._requests.probe(prompts[0])
        trained = self.spec.trains_on_logprobs and logprob_probe.is_trained_on(sampling, self.spec.config)
        with_logits = logprob_probe.needs_logits(self._verdict, sampling, trained=trained)
        samples = [(prompt, index) for prompt in prompts for index in range(sampling.n)]
        wave = len(samples)
        if with_logits:
            most, ranks = self.spec.config.max_num_seqs, launch.get_launcher_env().local_world_size
            wave = requests_at_a_time(sampling, self.spec.arch.vocab_size, most=most, ranks=ranks)
        rollouts: list[Rollout] = []
        for first in range(0, len(samples), wave):
            part = samples[first : first + wave]
            asked = [
                arguments(
                    sampling,
                    stream_key(sampling.seed, prompt.uid, index),
                    self._runtime.features,
                    with_logits=with_logits,
                    routed=self.spec.config.enable_rollout_routing_replay,
                )
                for prompt, index in part
            ]
            outputs = self._requests.submit([prompt for prompt, _ in part], asked)
            for prompt, index in part:
                output = yield from self._requests.next_completion(
                    outputs, f"prompt {prompt.source or prompt.uid}, sample {index}"
                )
                rollouts.append(self._rollout(prompt, index, output, sampling, with_logits=with_logits))
                self.on_sampled(len(rollouts[-1].response_ids), [prompt.uid])
        return rollouts

    def _rollout(
        self, prompt: Prompt, index: int, output: Any, sampling: SamplingConfig, *, with_logits: bool
    ) -> Rollout:
        where = f"prompt {prompt.source or prompt.uid}, sample {index}"
        tokens = list(output.token_ids)
        if not all(0 <= token < self.spec.arch.vocab_size for token in tokens):
            raise RuntimeError(f"{where}: TensorRT-LLM sampled a token outside the vocabulary: {max(tokens)}")
        try:
            if with_logits:
                logits = logits_of(output, self.spec.arch.vocab_size)
                if logits is None:
                    raise RuntimeError("TensorRT-LLM returned no logits for its tokens")
                scored = logprob_probe.rescore(logits, tokens, sampling)
                logprobs: list[float] | None = scored.logprobs_N.tolist()
                if sampling.return_kept_tokens:
                    self._kept.append(KeptTokens())
                    add_step(scored.kept_NV, scored.log_mass_N, [self._kept[-1]] * len(tokens))
            else:
                logprobs = logprobs_of(output)
            if logprobs is None:
                raise RuntimeError("TensorRT-LLM returned no log-probability for a sampled token")
            rollout = to_rollout(prompt, index, output, logprobs, sampling, self.policy_version, self.spec.decode)
            if self.spec.config.enable_rollout_routing_replay:
                self._routed.append(experts_of(output, rollout.num_tokens, self.spec.arch))
            return rollout
        except RuntimeError as error:
            raise RuntimeError(f"{where}: {error}") from error
