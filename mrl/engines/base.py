"""Interface of a rollout engine: `RolloutEngine`, `EngineSpec` (constructor argument) and `SamplingConfig`.

Each rank creates one engine object. The ranks of a replica call every method together, with the same arguments. An
engine never imports Megatron and does not read the training data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mrl.config.config import LoraConfig, RolloutConfig
from mrl.engines import _multiturn_rounds
from mrl.engines._adapters import EngineAdapters
from mrl.engines._multiturn_base import MultiTurnClient
from mrl.engines._work_queue import WorkQueue
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.resharding.layout import Layout
from mrl.resharding.weight_slice import WeightSlice
from mrl.types import PartialRollout, Prompt, Rollout


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling distribution of one call; `rollout_logprobs` are log-probabilities under this same distribution.

    logits / temperature -> top_k, then top_p, then min_p -> log-softmax over the kept tokens of the true vocabulary
    (without padding rows). `rollout_logprobs` are this log-softmax at the sampled token. Greedy decoding takes the
    largest logit and scores it under the same distribution.

    Attributes:
        n: Samples per prompt. max_tokens: Longest response, tokens. temperature: Divisor of the logits, above 0. top_k:
            Number of largest logits that are kept; -1: no limit. top_p: Nucleus mass, (0, 1]. min_p: Smallest kept
            probability as a fraction of the largest, [0, 1). greedy: Take the most likely token instead of sampling.
            ignore_eos: Ignore end tokens and generate `max_tokens` tokens. stop_token_ids: Token ids that end a
            response; the end token is the response's last token. stop: Strings that end a response when its text
            contains them. seed: Seed of the run. A random number depends only on (seed, prompt uid, sample index,
            position). return_kept_tokens: Return the token ids that top_k, top_p and min_p kept (`Rollout.kept_tokens`
            and `log_kept_mass`), at least on the first rank of the replica.
    """

    n: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    greedy: bool = False
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0
    return_kept_tokens: bool = False


@dataclass(frozen=True)
class EngineSpec:
    """Constructor argument of every engine.

    Attributes:
        config: `rollout` section. arch: Sizes and family of the model. tp_group: Ranks of the replica, in the order of
            their shards; None: a replica of one rank. device: Device of the weights and the KV cache. dtype: Data type
            of the stored weights. decode: Converts token ids to text; needed for stop strings. write_model_folder:
            Writes a Hugging Face folder (config.json of the model plus the given keys, tokenizer) that every rank can
            read, and returns its path. Collective over the ranks that run an engine.
        timeout_s: Longest wait for another rank or process, s.
        trains_on_logprobs: Whether the loss uses `rollout_logprobs`; False: only metrics do.
        abort_requested: See `RolloutEngine.abort_requested`.
        on_forward: See `RolloutEngine.on_forward`.
        on_sampled: See `RolloutEngine.on_sampled`.
        lora: Low-rank adapters that the engine stores beside the weights; None: none, or merged into the weights.
    """

    config: RolloutConfig
    arch: ArchSpec
    tp_group: dist.ProcessGroup | None
    device: torch.device
    dtype: torch.dtype
    decode: Callable[[Sequence[int]], str]
    write_model_folder: Callable[[Mapping[str, Any]], Path]
    timeout_s: float
    trains_on_logprobs: bool
    abort_requested: Callable[[], bool] = lambda: False
    on_forward: Callable[[], object] = lambda: None
    on_sampled: Callable[[int, Sequence[int]], object] = lambda num_tokens, finished_uids: None
    lora: LoraConfig | None = None

    @property
    def dtype_name(self) -> str:
        """Data type as layouts and checkpoints spell it, for example "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def leads_replica(self) -> bool:
        """Whether this rank is the first of its replica; only its rollouts are used."""
        return self.tp_group is None or dist.get_rank(self.tp_group) == 0

    @property
    def max_len(self) -> int:
        """Longest sequence (prompt and response), tokens."""
        return self.config.max_sequence_length


RENAMED = {
    "converse": "generate_multi_turn",
    "stream": "generate_streaming",
    "start_beside": "start_without_engine",
    "told_to_stop": "abort_requested",
    "sampled": "on_forward",
}
"""Old name -> new name of what an engine may override."""


class RolloutEngine(ABC):
    """Generates responses with weights that weight sync overwrites in place.

    Call order: `begin_update`, `update_weights` for each bucket, `finish_update`, then `generate`. `sleep` and `wake`
    free and restore the KV cache between generation phases.
    """

    policy_version: int
    """Optimizer steps in the current weights; -1: no weights were loaded yet."""

    def __init_subclass__(cls) -> None:
        """Refuses an engine that overrides a method by its old name, which nothing would call.

        Raises:
            UserError: A method or attribute must be renamed.
        """
        super().__init_subclass__()
        for old, new in RENAMED.items():
            if old in vars(cls):
                raise UserError(f"{cls.__name__}.{old} is called {new} now. Rename it.")

    @classmethod
    def start_without_engine(cls) -> None:
        """Collective over the job: runs on ranks without an engine while the other ranks start an engine.

        An engine overrides it if its start needs these ranks too, for example to split a communicator.

        Raises:
            UserError: The engine cannot start in this environment.
        """
        return

    notes: tuple[str, ...] = ()
    """Deviations of the installed engine version from the config, logged at the start."""

    abort_requested: Callable[[], bool]
    """Returns whether an abort was requested on this rank. `generate` polls it between forwards and agrees with the
    other ranks of the replica; if any rank returns True, all return the finished responses at once. An engine that does
    not poll delays the stop."""

    on_forward: Callable[[], object]
    """Callback after each forward. Other ranks that wait for this one take it as a sign of progress; an engine that
    does not call it must finish a call within `run.collective_timeout_s`."""

    on_sampled: Callable[[int, Sequence[int]], object]
    """Callback with the number of tokens sampled since its last call, and the prompt uid of each sample that finished
    since then. The console shows the progress; `generate` calls it at its end for an engine that does not."""

    adapters: EngineAdapters | None = None
    """Receiver of low-rank adapters, with `spec.lora`. Then `update_weights` writes the model's own weights."""

    _asleep: Collection[str] | bool = False
    """True, or names of the parts that are asleep, if `generate` needs a `wake` first; set by the engine."""

    _broken: str = ""
    """Reason why weight updates cannot finish any more; "": they can. Set by the engine."""

    _has_weights: bool = False
    """True between `finish_update` and the next `begin_update` or `release`; set by the engine."""

    def __init__(self, spec: EngineSpec) -> None:
        """Collective over the job: creates this rank's part of an engine replica, without weights."""
        self.spec = spec
        self.abort_requested, self.on_forward = spec.abort_requested, spec.on_forward
        self.on_sampled = spec.on_sampled
        self.policy_version = -1

    @abstractmethod
    def layout(self) -> Layout:
        """Returns which elements of which Hugging Face tensors this rank stores, and where."""

    @abstractmethod
    def begin_update(self) -> None:
        """Starts a weight update and drops cached prefixes. `generate` raises until `finish_update`."""

    @abstractmethod
    def update_weights(self, bucket: Sequence[WeightSlice]) -> None:
        """Copies a bucket of slices into the engine's weights.

        Weight addresses do not change. The caller may reuse the bucket's buffers on return. `WeightSlice.write_to` also
        accumulates the checksum of the written elements; the trainer then calls `checksum` less often.
        """

    @abstractmethod
    def checksum(self) -> int:
        """Returns the sum modulo 2**64 over the bit patterns of all stored elements; their order does not matter.

        The trainer calls it in the first weight sync, in the first after a failure or a `release`, and whenever a slice
        was copied without `WeightSlice.write_to`.
        """

    @abstractmethod
    def finish_update(self, policy_version: int) -> None:
        """Ends the weight update and allows `generate`, with rollouts labelled `policy_version`."""

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        """Collective over the replica: returns `sampling.n` rollouts per prompt, ordered by prompt, then sample index.

        All ranks of the replica pass the same prompts and receive the same rollouts. After an abort request the list is
        shorter.

        Raises:
            RuntimeError: The engine is asleep, or a weight update is open.
            UserError: A prompt does not fit.
        """
        self._check_ready()
        return self._reported(lambda: self._generate(prompts, sampling)) if prompts else []

    def _reported(self, generate: Callable[[], list[Rollout]]) -> list[Rollout]:
        """Returns the rollouts of `generate`; passes their tokens to `on_sampled` if the engine did not call it."""
        on_sampled, calls = self.on_sampled, 0

        def count(num_tokens: int, finished_uids: Sequence[int]) -> object:
            nonlocal calls
            calls += 1
            return on_sampled(num_tokens, finished_uids)

        self.on_sampled = count
        try:
            rollouts = generate()
        finally:
            self.on_sampled = on_sampled
        if not calls:
            on_sampled(sum(len(each.response_ids) for each in rollouts), [each.prompt.uid for each in rollouts])
        return rollouts

    def _generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        """Implements `generate` for at least one prompt; the engine is awake and its weights are complete.

        An engine defines this method, or overrides `generate` with its own checks.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither _generate nor generate")

    def _check_ready(self) -> None:
        if self._asleep:
            raise RuntimeError("the engine sleeps: call wake() before generate()")
        if not self._has_weights:
            why = self._broken or "call begin_update(), update_weights() and finish_update() before generate()"
            raise RuntimeError(f"weight update incomplete: {why}")

    def _check_updating(self) -> None:
        if self._has_weights:
            raise RuntimeError("update_weights() outside a weight update: call begin_update() first")

    def generate_multi_turn(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, client: MultiTurnClient
    ) -> list[Rollout]:
        """Collective over the replica: runs `sampling.n` multi-turn episodes per prompt, ordered as in `generate`.

        A sequence that stops is submitted to `client`, and sampling continues after the reply. This implementation
        calls `generate` once per round and waits for all replies of a round. An engine that can append replies while
        other sequences decode overrides it. Both sample the same tokens.

        Args:
            prompts: First turn of each episode, the same on every rank of the replica.
            sampling: Distribution of each turn; `max_tokens` limits all response tokens of an episode, environment
                tokens included.
            client: Multi-turn client that answers stopped sequences.

        Returns:
            Rollouts with `sampled_mask`; fewer after an abort request.

        Raises:
            RuntimeError: See `generate`; or a reply does not fit.
        """
        first = self.generate(prompts, sampling)
        if len(first) < len(prompts) * sampling.n:
            return []  # an abort was requested
        return _multiturn_rounds.generate_in_rounds(
            first,
            lambda later, room: self.generate(later, replace(sampling, n=1, max_tokens=room)),
            client,
            num_samples=sampling.n,
            seed=sampling.seed,
            limit=sampling.max_tokens,
            max_len=self.spec.max_len,
        )

    def generate_streaming(self, work_queue: WorkQueue, sampling: SamplingConfig) -> list[PartialRollout]:
        """Collective over all replicas: generates the work that `work_queue` hands out until `work_queue` returns None.

        This implementation finishes each batch with `generate` before it polls `work_queue` again, so no response stays
        partial. An engine that can pause between two tokens overrides it. Both sample the same tokens.

        Args:
            work_queue: Work queue that hands out prompts and receives finished responses.
            sampling: See `generate`.

        Returns:
            Partial rollouts, the same on every rank of the replica, ordered by (prompt uid, sample index). After an
                abort request, those that were running.

        Raises:
            RuntimeError: See `generate`; or the work contains partial rollouts and the engine cannot resume them.
            UserError: See `generate`.
        """
        finished: list[Rollout] = []
        while (work := work_queue.poll(finished, 0)) is not None:
            num_partial = sum(len(one.partial_rollouts) for one in work)
            if num_partial:
                raise RuntimeError(
                    f"rollout.name={self.spec.config.name} cannot resume partial rollouts ({num_partial} pending). Use "
                    "the engine that sampled them, such as rollout.name=native."
                )
            asked = {(one.prompt.uid, sample) for one in work for sample in one.new_indices}
            prompts = {one.prompt.uid: one.prompt for one in work if one.new_indices}
            found = self.generate(list(prompts.values()), sampling) if prompts else []
            finished = [one for one in found if (one.prompt.uid, one.sample_index) in asked]
        return []

    @abstractmethod
    def sleep(self) -> None:
        """Frees the KV cache until `wake`; the weights stay."""

    @abstractmethod
    def wake(self) -> None:
        """Allocates the KV cache again."""

    def release(self) -> None:  # noqa: B027 -- optional: an engine may keep its weights
        """Frees the memory of the weights until the next `begin_update`, if the engine can; otherwise keeps them.

        Without weights, `policy_version` is -1 and `generate` raises.
        """

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Returns counts and seconds of the last `generate`, such as prefill_tokens, decode_steps and decode_s."""

    @abstractmethod
    def close(self) -> None:
        """Frees all memory and ends all processes of the engine."""
