"""The interface of a rollout engine.

Owns `RolloutEngine`, `EngineSpec` and `SamplingConfig`. An engine is one object per rank; the ranks of
a replica call each method together, with the same arguments. Engines know no Megatron and no prompt source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mrl.config.config import RolloutConfig
from mrl.engines import _multiturn_rounds
from mrl.engines._multiturn_base import Talk
from mrl.engines._work_queue import Feed
from mrl.models.base import ArchSpec
from mrl.resharding.layout import Layout
from mrl.resharding.weight_slice import WeightSlice
from mrl.types import Begun, Prompt, Rollout


@dataclass(frozen=True)
class SamplingConfig:
    """The one distribution that the engine samples from and scores with (the sampling contract).

    logits / temperature -> keep top_k, then top_p, then min_p -> log-softmax over what is kept of the true vocabulary.
    `rollout_logprobs` are this log-softmax at the sampled token. Greedy takes the largest logit and scores it under the
    same distribution.

    Attributes:
        n: Samples per prompt.
        max_tokens: Longest response, tokens.
        temperature: Above 0.
        top_k: -1: all.
        top_p: (0, 1].
        min_p: [0, 1).
        greedy: Take the most likely token.
        ignore_eos: Sample on to `max_tokens`.
        stop_token_ids: Tokens that end a response; they stay part of it.
        stop: Strings that end a response when they appear in its text.
        seed: With (prompt uid, sample index, position) the whole key of each random number.
        with_support: Rollouts tell which tokens were kept (`Rollout.support` and `log_kept_mass`), on the first rank of
            the replica at least.
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
    with_support: bool = False


@dataclass(frozen=True)
class EngineSpec:
    """What every engine is built from.

    Attributes:
        config: `rollout` section.
        arch: The model.
        tp_group: Ranks of the replica, in the order of their shards; None: this rank alone.
        device: Where weights and cache are.
        dtype: Of the stored weights.
        decode: Token ids -> text, for stop strings.
        model_folder: Collective over the ranks that sample: a Hugging Face folder with the model's config.json, with
            these further keys, and tokenizer, which every rank can read; it is written when it is called, for the
            versions of transformers in mrl's range.
        timeout_s: Longest wait for another rank or process, s.
        trains_on_logprobs: Whether the loss reads `rollout_logprobs`; False where only metrics do.
    """

    config: RolloutConfig
    arch: ArchSpec
    tp_group: dist.ProcessGroup | None
    device: torch.device
    dtype: torch.dtype
    decode: Callable[[Sequence[int]], str]
    model_folder: Callable[[Mapping[str, Any]], Path]
    timeout_s: float
    trains_on_logprobs: bool

    @property
    def dtype_name(self) -> str:
        """As layouts and checkpoints spell it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def leads_replica(self) -> bool:
        """Whether this rank is the first of its replica, whose rollouts are used."""
        return self.tp_group is None or dist.get_rank(self.tp_group) == 0

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence."""
        return self.config.longest


class RolloutEngine(ABC):
    """Generates responses with weights that are replaced in place."""

    policy_version: int
    """Optimizer steps in the weights now held; -1 before the first refit."""

    @classmethod
    def start_beside(cls) -> None:
        """Collective over the job, on ranks that hold no engine while others start theirs: their part in that, if any.

        Raises:
            UserError: It cannot be done here.
        """
        return

    notes: tuple[str, ...] = ()
    """What the installed engine cannot do as the config has it, and does otherwise; told at the start."""

    told_to_stop: Callable[[], bool] = staticmethod(lambda: False)
    """Whether this rank was told to stop. `generate` asks it now and then, for the replica: if any of its ranks was
    told, it returns at once with what has ended. An engine that does not ask delays the stop."""

    sampled: Callable[[], object] = staticmethod(lambda: None)
    """To be called after each forward of a sampling that is longer than a moment: ranks that wait for this one take it
    as a sign that it works. An engine that does not call it must sample within `run.collective_timeout_s`."""

    def __init__(self, spec: EngineSpec) -> None:
        """Collective over the job: this rank's part of its replica's engine; it holds no weights yet."""
        self.spec = spec
        self.policy_version = -1

    @abstractmethod
    def layout(self) -> Layout:
        """What this rank stores, in Hugging Face coordinates."""

    @abstractmethod
    def begin_update(self) -> None:
        """From here until `finish_update` the engine refuses to generate; cached prefixes are dropped."""

    @abstractmethod
    def update_weights(self, bucket: Sequence[WeightSlice]) -> None:
        """Copies a bucket into place. Addresses do not change; the bucket's buffers may be reused on return.

        What is written with `WeightSlice.write_to` is added up in the same pass; then `checksum` is asked less often.
        """

    @abstractmethod
    def checksum(self) -> int:
        """Order-free 64-bit sum over the bit patterns of all stored elements.

        Asked for in the first refit, in the first after a failure or a release, and in each one in which a slice was
        not written with `WeightSlice.write_to`.
        """

    @abstractmethod
    def finish_update(self, policy_version: int) -> None:
        """Declares the weights whole: the engine generates again, under the new version."""

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        """Collective over the replica: `sampling.n` rollouts of each prompt, ordered by prompt, then sample index.

        The same prompts on every rank of the replica give the same rollouts on every rank.

        Raises:
            RuntimeError: The engine sleeps, or a refit was begun and not finished.
            UserError: A prompt does not fit.
        """

    def converse(self, prompts: Sequence[Prompt], sampling: SamplingConfig, talk: Talk) -> list[Rollout]:
        """Collective over the replica: `sampling.n` conversations of each prompt, ordered as `generate` orders them.

        A sequence that stops is handed to `talk` and samples on after its answer. Here by rounds of `generate`, each of
        which waits for all answers to the last; an engine that can take answers in while others sample overrides it.
        Which tokens are sampled does not depend on that.

        Args:
            prompts: The same on every rank of the replica.
            sampling: Of each turn; `max_tokens` holds for all response tokens of a conversation, observed ones too.
            talk: Answers.

        Returns:
            With `sampled_mask`; where the engine was told to stop, fewer.

        Raises:
            RuntimeError: As `generate`, or an answer does not fit.
        """
        first = self.generate(prompts, sampling)
        if len(first) < len(prompts) * sampling.n:
            return []  # told to stop
        return _multiturn_rounds.converse(
            first,
            lambda later, room: self.generate(later, replace(sampling, n=1, max_tokens=room)),
            talk,
            num_samples=sampling.n,
            seed=sampling.seed,
            limit=sampling.max_tokens,
            max_len=self.spec.max_len,
        )

    def stream(self, feed: Feed, sampling: SamplingConfig) -> list[Begun]:
        """Collective over all replicas: samples what `feed` hands out, until it says stop.

        Here by calls of `generate`, between which the feed is asked: nothing is ever left unfinished. An engine that
        can stop and go on between any two tokens overrides it. Which tokens are sampled does not depend on that.

        Args:
            feed: Hands out work, and takes what is whole.
            sampling: As of `generate`; `n` samples of a prompt make it whole.

        Returns:
            Responses that are not whole, on every rank of the replica, in the order of (prompt uid, sample index).
            Where a rank was told to stop, those that there are then.

        Raises:
            RuntimeError: As `generate`; or a begun sample is to go on and the engine samples only whole responses.
            UserError: As `generate`.
        """
        finished: list[Rollout] = []
        while (work := feed.pulse(finished, 0)) is not None:
            begun = sum(len(one.begun) for one in work)
            if begun:
                raise RuntimeError(
                    f"{begun} samples are to go on where they stopped, and rollout.name={self.spec.config.name} "
                    "samples whole responses only; an engine that can stop and go on left them: use that one"
                )
            asked = {(one.prompt.uid, sample) for one in work for sample in one.new}
            prompts = {one.prompt.uid: one.prompt for one in work if one.new}
            found = self.generate(list(prompts.values()), sampling) if prompts else []
            finished = [one for one in found if (one.prompt.uid, one.sample_index) in asked]
        return []

    @abstractmethod
    def sleep(self) -> None:
        """Frees the KV cache until `wake`; weights stay."""

    @abstractmethod
    def wake(self) -> None:
        """Makes the KV cache ready."""

    def release(self) -> None:  # noqa: B027 -- an engine may keep them
        """Gives the weights' memory back until the next `begin_update`, where the engine can; else they stay.

        An engine without weights has `policy_version` -1 and refuses to generate.
        """

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counts and seconds of the last `generate` (prefill_tokens, decode_steps, prefill_s, decode_s ...)."""

    @abstractmethod
    def close(self) -> None:
        """Releases everything."""
