"""rollout.name=trtllm: TensorRT-LLM's LLM API (PyTorch backend) on the training ranks themselves.

Owns the engine's life in the order that TensorRT-LLM wants: weights and KV cache that sleep and wake by tag, a refit
inside its `control_action` (pre-reload, buckets of whole Hugging Face tensors, processing, prefix cache reset), and one
request for each sample. TensorRT-LLM cuts and fuses the tensors itself: it is handed whole ones, of which only what
this rank's modules read has come (`weight_shard_map.py`).

No TensorRT-LLM has run this: it was written against the signatures in tests/engines/trtllm/signatures.json, which say
where each was read. What can be asked of the real package is asked at start: its features (`features.py`), where its
executor is (`llm_runtime.py`), what its log-probabilities score (`logprob_probe.py`).
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
from mrl.engines._fp8_support import config_keys
from mrl.engines._kept_tokens import Kept, add_step
from mrl.engines._prompt_checks import check_prompts
from mrl.engines.base import EngineSpec, RolloutEngine, SamplingConfig
from mrl.engines.trtllm import fp8, logprob_probe
from mrl.engines.trtllm.llm_runtime import SETTINGS, Host, check_min_p, refusal
from mrl.engines.trtllm.logits import requests_at_a_time
from mrl.engines.trtllm.logprob_probe import Verdict
from mrl.engines.trtllm.mpi_env import start_beside
from mrl.engines.trtllm.replica import Replica
from mrl.engines.trtllm.requests import Requests
from mrl.engines.trtllm.sampling import arguments, experts_of, logits_of, logprobs_of, to_rollout
from mrl.engines.trtllm.weight_shard_map import Parts
from mrl.resharding.checksum import MODULUS
from mrl.resharding.layout import Layout
from mrl.resharding.weight_slice import WeightSlice
from mrl.types import Prompt, Rollout

MIB = 1 << 20

CLOSE_S, FAILED_CLOSE_S = 30.0, 2.0
"""For the event loop to end; after a failure it may wait for a rank that has gone."""


class LlmEngine(RolloutEngine):
    """One rank of a replica."""

    def __init__(self, spec: EngineSpec) -> None:
        """Collective over the ranks that sample: starts TensorRT-LLM in this process.

        Args:
            spec: The replica's.

        Raises:
            UserError: TensorRT-LLM is not there, or cannot start in this job.
        """
        super().__init__(spec)
        config, arch, device = spec.config, spec.arch, spec.device
        self._replica = Replica(spec.tp_group)
        self._bucket_bytes = config.checkpoint_engine.update_weights_bucket_megabytes * MIB
        self._host = Host(
            config,
            arch,
            spec.model_folder(config_keys(config)),
            replica=self._replica,
            device=device,
            dtype=spec.dtype,
            timeout_s=spec.timeout_s,
            trains_on_logprobs=spec.trains_on_logprobs,
        )
        self._requests = Requests(self._host, spec)
        model = self._host.executor.model_engine.model
        self._in_parts = "allow_partial_loading" in inspect.signature(model.load_weights).parameters
        try:
            if config.quantization is not None:
                fp8.check_started(model, spec, self._replica.rank, graphs=self._host.graphs)
            self._parts = Parts(model, spec, self._replica.rank)
            if not self._in_parts and device.type == "cuda":
                weights = sum(weight.nbytes for weight in model.parameters())
                self._parts.check_staging(weights, torch.cuda.get_device_properties(device).total_memory)
        except Exception:
            self._host.close(wait_s=FAILED_CLOSE_S)
            raise
        self.notes = (*self._host.notes, *self._parts.notes)
        self._asleep: set[str] = set()
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._update: ExitStack | None = None
        self._assembler = self._parts.assembler()
        self._given, self._num_buckets = 0, 0
        self._whole = False
        self._broken, self._failed = "", False
        self._verdict: Verdict | None = None
        self._stats: dict[str, float] = {}
        self._routed: list[Tensor] = []
        self._kept: list[Kept] = []

    @classmethod
    def start_beside(cls) -> None:
        """Imports TensorRT-LLM where that takes all ranks."""
        start_beside()

    # weights ----------------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """What this rank's modules read of each Hugging Face tensor, and the scales of those in FP8, whole."""
        return self._parts.layout

    def begin_update(self) -> None:
        """Drains and pauses the engine, wakes its weights, and takes them apart for loading.

        After a refit that failed half-way it only stays shut: TensorRT-LLM has no way back from mixed weights.

        Raises:
            RuntimeError: TensorRT-LLM fails.
        """
        self._whole = False
        if self._update is not None:
            self._break("a refit ended before all of its weights were loaded")
        if self._broken:
            self._leave_update()
            return
        self._assembler = self._parts.assembler()
        self._given, self._num_buckets = 0, 0
        update = ExitStack()
        self._update = update
        update.enter_context(launch.scrubbed_variables(hide=(), given=SETTINGS))
        update.enter_context(self._host.paused())
        self._materialize(self._host.features.weight_tags)
        loader = self._host.executor.model_engine.model_loader
        if hasattr(loader, "begin_update_weights"):  # newer than 1.2
            loader.begin_update_weights()
        self._each_module("pre_reload_weights")

    def update_weights(self, bucket: Sequence[WeightSlice]) -> None:
        """Puts regions together; complete tensors are handed to TensorRT-LLM, bucket by bucket.

        Raises:
            RuntimeError: No update was begun, a region does not fit, or TensorRT-LLM refuses a bucket.
        """
        if self._update is None:
            raise RuntimeError(self._broken or "update_weights outside an update: call begin_update first")
        for item in bucket:
            self._assembler.add([item])
            full = self._in_parts and self._assembler.ready_bytes >= self._bucket_bytes
            if self._assembler.ready and (full or self._assembler.has_all):
                self._load()

    def checksum(self) -> int:
        """Sum over what `ModelLoader.reload` was given in this refit, by its bits; what it stores is not read back."""
        return self._given % MODULUS

    def finish_update(self, policy_version: int) -> None:
        """Lets TensorRT-LLM process the loaded weights; the engine generates again.

        Raises:
            RuntimeError: Tensors are missing, or TensorRT-LLM fails.
        """
        if self._update is None:
            raise RuntimeError(self._broken or "finish_update outside an update: call begin_update first")
        lacking = self._assembler.lacking
        if lacking:
            self._break(f"{len(lacking)} tensors did not come, the first of them '{lacking[0]}'")
            self._leave_update()
            raise RuntimeError(self._broken)
        try:
            executor = self._host.executor
            loader = executor.model_engine.model_loader
            if hasattr(loader, "finalize_update_weights"):  # newer than 1.2
                loader.finalize_update_weights()
            self._each_module("process_weights_after_loading", "post_load_weights")
            self._parts.check()
            executor.reset_prefix_cache()
            self._synchronize()
        except Exception as error:
            self._break(f"processing the loaded weights failed: {refusal(error)}")
            raise RuntimeError(self._broken) from error
        finally:
            self._leave_update()
        self.policy_version = policy_version
        self._whole = True

    def _load(self) -> None:
        """Hands the complete tensors over; their buffers are free when TensorRT-LLM has read them."""
        tensors = self._assembler.take()
        self._num_buckets += 1
        model_engine = self._host.executor.model_engine
        parts: dict[str, Any] = {"allow_partial_loading": True} if self._in_parts else {}
        sums = sum(self._assembler.bit_sum(name, tensor) for name, tensor in tensors.items())
        try:
            model_engine.model_loader.reload(model_engine.model, {**tensors, **fp8.unit_scales(tensors)}, **parts)
            self._synchronize()
        except Exception as error:
            names = list(tensors)
            which = f"'{names[0]}'" if len(names) == 1 else f"'{names[0]}' to '{names[-1]}' ({len(names)} tensors)"
            self._break(f"TensorRT-LLM refused bucket {self._num_buckets} of the refit, {which}: {refusal(error)}")
            raise RuntimeError(self._broken) from error
        self._given += sums

    def _each_module(self, *names: str) -> None:
        """Calls the methods of these names on every module of the model that has them, module by module."""
        for module in self._host.executor.model_engine.model.modules():
            for name in names:
                if hasattr(module, name) and not getattr(module, "_weights_removed", False):
                    getattr(module, name)()

    def _break(self, why: str) -> None:
        """From here on the engine refuses to generate and to be refitted."""
        self._broken = self._broken or why

    def _leave_update(self) -> None:
        if self._update is not None:
            update, self._update = self._update, None
            update.close()

    def _synchronize(self) -> None:
        if self.spec.device.type == "cuda":
            torch.cuda.synchronize(self.spec.device)

    # memory -----------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Takes KV cache and weights off the device until `wake`; nothing where `rollout.free_cache_engine` is false.

        The weights wait in pinned memory of the host; where they would be discarded they stay until `release`.
        """
        features = self._host.features
        tags = {features.cache_tag, *features.weight_tags} - set(features.discarded_tags)
        self._dematerialize(tags)

    def release(self) -> None:
        """Discards the weights where the version can, until the next refit; else they wait as `sleep` left them.

        Parameters that no refit brings, such as the scales of the cache, wait in host memory.
        """
        tags = set(self._host.features.discarded_tags)
        if not self.spec.config.free_cache_engine or not tags - self._asleep:
            return
        self._whole, self.policy_version = False, -1
        self._aside = [(weight, weight.detach().to("cpu", copy=True)) for weight in self._parts.not_brought()]
        self._dematerialize(tags)

    def _dematerialize(self, tags: set[str]) -> None:
        """Takes those of the tags that are awake off the device, in the order of waking backwards."""
        features = self._host.features
        ordered = [tag for tag in (features.cache_tag, *features.weight_tags[::-1]) if tag in tags - self._asleep]
        if not self.spec.config.free_cache_engine or not ordered:
            return
        from tensorrt_llm._torch import virtual_memory

        with self._host.paused():
            self._host.executor.reset_prefix_cache()  # its blocks do not survive
            self._synchronize()
            virtual_memory.release_with_tag(*ordered)
        self._asleep |= set(ordered)

    def wake(self) -> None:
        """Brings back what sleeps: first the weights, then the KV cache."""
        if self._asleep:
            with self._host.paused():
                self._materialize((*self._host.features.weight_tags, self._host.features.cache_tag))

    def _materialize(self, tags: Sequence[str]) -> None:
        """Inside a pause: brings back those of the tags that sleep."""
        tags = [tag for tag in tags if tag in self._asleep]
        if tags:
            from tensorrt_llm._torch import virtual_memory

            virtual_memory.materialize_with_tag(*tags)
            self._synchronize()
            self._asleep -= set(tags)
            if not self._asleep.intersection(self._host.features.discarded_tags):
                for weight, kept in self._aside:
                    weight.detach().copy_(kept)
                self._aside = []

    def close(self) -> None:
        """Ends TensorRT-LLM; the engine cannot be used again."""
        self._whole = False
        self._leave_update()
        self._host.close(wait_s=FAILED_CLOSE_S if self._failed or self._broken else CLOSE_S)

    def stats(self) -> dict[str, float]:
        """Of the last `generate`: prefill_tokens (of prompts, each counted once a sample), decode_tokens."""
        return dict(self._stats)

    # generation -------------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        """Collective over the replica: `sampling.n` rollouts of each prompt, ordered by prompt, then sample index.

        The first rank asks TensorRT-LLM; the others' parts of the engine work with it, and they get its rollouts.

        Raises:
            RuntimeError: The engine sleeps, its weights are not whole, or it failed on any rank of the replica.
            UserError: A prompt does not fit, or the setting cannot be sampled as the contract wants.
        """
        if self._asleep:
            raise RuntimeError("the engine sleeps: call wake before generate")
        if not self._whole:
            refitted = self.policy_version >= 0
            why = "no update was finished since the last one began" if refitted else "no refit has filled them"
            why = self._broken or why
            raise RuntimeError(f"the engine's weights are not whole: {why}")
        if not prompts:
            return []
        check_min_p(self.spec.config, self._host.features, sampling.min_p)
        check_prompts(prompts, self.spec, sampling, longest=self.spec.config.longest_prompt)
        self._routed, self._kept = [], []
        stopped: list[Rollout] = []
        try:
            rollouts = self._replica.call(
                lambda: self._lead(prompts, sampling),
                check=self._host.check,
                told_to_stop=self.told_to_stop,
                stopped=stopped,
            )
        except RuntimeError:
            self._failed = True
            raise
        # these are on the first rank: only it sends samples on
        for rollout, routed in zip(rollouts, self._routed, strict=False):
            rollout.routed_experts = routed
        for rollout, kept in zip(rollouts, self._kept, strict=False):
            kept.give(rollout)
        self._stats = {
            "prefill_tokens": float(sum(len(rollout.prompt.prompt_ids) for rollout in rollouts)),
            "decode_tokens": float(sum(len(rollout.response_ids) for rollout in rollouts)),
        }
        return rollouts

    def _lead(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> Generator[None, None, list[Rollout]]:
        """On the first rank: every sample as a request, a few at a time where logits come back with them."""
        if self._verdict is None:
            self._verdict = yield from self._requests.probe(prompts[0])
        trained = self.spec.trains_on_logprobs and logprob_probe.is_trained_on(sampling, self.spec.config)
        with_logits = logprob_probe.needs_logits(self._verdict, sampling, trained=trained)
        samples = [(prompt, index) for prompt in prompts for index in range(sampling.n)]
        wave = len(samples)
        if with_logits:
            most, ranks = self.spec.config.max_num_seqs, launch.environment().local_world_size
            wave = requests_at_a_time(sampling, self.spec.arch.vocab_size, most=most, ranks=ranks)
        rollouts: list[Rollout] = []
        for first in range(0, len(samples), wave):
            part = samples[first : first + wave]
            asked = [
                arguments(
                    sampling,
                    stream_key(sampling.seed, prompt.uid, index),
                    self._host.features,
                    with_logits=with_logits,
                    routed=self.spec.config.enable_rollout_routing_replay,
                )
                for prompt, index in part
            ]
            outputs = self._requests.ask([prompt for prompt, _ in part], asked)
            for prompt, index in part:
                output = yield from self._requests.next(
                    outputs, f"prompt {prompt.source or prompt.uid}, sample {index}"
                )
                rollouts.append(self._rollout(prompt, index, output, sampling, with_logits=with_logits))
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
                scored = logprob_probe.corrected(logits, tokens, sampling)
                logprobs: list[float] | None = scored.logprobs_N.tolist()
                if sampling.with_support:
                    self._kept.append(Kept())
                    add_step(scored.kept_NV, scored.log_mass_N, [self._kept[-1]] * len(tokens))
            else:
                logprobs = logprobs_of(output)
            if logprobs is None:
                raise RuntimeError("TensorRT-LLM gave no log-probability for a token that it sampled")
            rollout = to_rollout(prompt, index, output, logprobs, sampling, self.policy_version, self.spec.decode)
            if self.spec.config.enable_rollout_routing_replay:
                self._routed.append(experts_of(output, rollout.num_tokens, self.spec.arch))
            return rollout
        except RuntimeError as error:
            raise RuntimeError(f"{where}: {error}") from error
