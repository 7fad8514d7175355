"""Weight-sync self-test: syncing the same weights twice must not change the engine's output. Runs once per start.

`WeightSync` verifies the bytes that the engine receives. An engine that splits, fuses or rearranges them itself, or
reads them at cached addresses (CUDA graphs), can still be wrong. So a few fixed prompts are answered greedily after a
weight sync, the engine sleeps and wakes, the same weights are synced again, and tokens and log-probabilities must be
the same.

An error that is the same every time, such as a tensor that is never read, is not found. `tools/accept_trtllm.py` and
`tools/accept_vllm.py` compare with the actor's log-probabilities for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mrl.config.config import RolloutConfig
from mrl.distributed.collectives import raise_on_all_ranks
from mrl.engines._adapters import EngineAdapters
from mrl.engines._capabilities import engine_capabilities
from mrl.engines.base import SamplingConfig
from mrl.models.base import ArchSpec
from mrl.types import Prompt, Rollout

NUM_PROMPTS = 4
PROMPT_LEN = 8
MAX_TOKENS = 16
"""Length of a response, tokens; longer ones find no more errors."""

STRIDE = 7919
"""Distance of successive prompt token ids; a prime, so that the ids spread over any vocabulary."""

EXACT = 0.0
"""Tolerance on a CPU, nats: the same kernels add in the same order."""

ROUNDING = 0.05
"""Tolerance on a GPU, nats. Each prompt is alone in its batch, so kernels are the same and only the order of atomic
adds may differ; bfloat16 logits have 8 bits, so a log-probability of -12 has an error of 12 x 2^-8 nats."""

FILLING = 0.05
"""Value of all adapters while it is tested whether they are used."""

Generate = Callable[[Sequence[Prompt], SamplingConfig], list[Rollout]]


@dataclass(frozen=True)
class ResponseDiff:
    """Difference between the responses after two weight syncs.

    Attributes:
        largest: Largest difference of log-probabilities up to the first different token of each prompt, nats.
        num_compared: Number of tokens compared, over all prompts.
        num_parted: Number of prompts with different tokens.
        where: Description of the largest difference: prompt, position, both log-probabilities.
    """

    largest: float
    num_compared: int
    num_parted: int
    where: str

    def within(self, tolerance: float) -> bool:
        """Returns whether the difference is within rounding; at most half of the prompts may differ in tokens."""
        allowed = NUM_PROMPTS // 2 if tolerance > 0 else 0
        return self.largest <= tolerance and self.num_parted <= allowed  # False for NaN

    def __str__(self) -> str:
        return (
            f"{self.num_compared} tokens compared, log-probabilities differ by at most {self.largest:.3g} nats"
            f"{self.where}, tokens differ for {self.num_parted} of {NUM_PROMPTS} prompts"
        )


def is_wanted(rollout: RolloutConfig) -> bool:
    """Returns `rollout.checkpoint_engine.canary`; null: the engine's `checks_weight_sync`."""
    wanted = rollout.checkpoint_engine.canary
    return engine_capabilities(rollout.name).checks_weight_sync if wanted is None else wanted


def tolerance_of(device: torch.device) -> float:
    """Returns the largest difference that counts as rounding, nats."""
    return EXACT if device.type == "cpu" else ROUNDING


def prompts_of(arch: ArchSpec, rollout: RolloutConfig) -> list[Prompt]:
    """Returns the fixed test prompts, with token ids spread over the vocabulary."""
    length = min(PROMPT_LEN, rollout.prompt_length)
    return [
        Prompt(
            uid=number,
            prompt_ids=tuple((number + 1) * (i + 1) * STRIDE % arch.vocab_size for i in range(length)),
            text="",
            source=f"canary {number}",
        )
        for number in range(NUM_PROMPTS)
    ]


def sampling_of(rollout: RolloutConfig) -> SamplingConfig:
    """Returns greedy sampling at temperature 1 without truncation, which every engine scores exactly."""
    room = rollout.max_sequence_length - min(PROMPT_LEN, rollout.prompt_length)
    return SamplingConfig(n=1, max_tokens=min(MAX_TOKENS, rollout.response_length, room), greedy=True, ignore_eos=True)


def sample_responses(generate: Generate, arch: ArchSpec, rollout: RolloutConfig) -> list[Rollout]:
    """Collective over the replica: samples the fixed prompts, each alone in its batch.

    Returns:
        One response for each prompt; fewer after a stop request.
    """
    sampling = sampling_of(rollout)
    return [found for prompt in prompts_of(arch, rollout) for found in generate([prompt], sampling)]


def compare(before: Sequence[Rollout], after: Sequence[Rollout]) -> ResponseDiff:
    """Compares two lists of responses, token by token until the tokens differ."""
    largest, where, compared, parted = 0.0, "", 0, 0
    for one, other in zip(before, after, strict=True):
        pairs = zip(one.response_ids, other.response_ids, one.rollout_logprobs, other.rollout_logprobs, strict=True)
        for position, (token, new_token, logprob, new_logprob) in enumerate(pairs):
            compared += 1
            difference = abs(new_logprob - logprob)
            if difference > largest or math.isnan(difference) > math.isnan(largest):
                largest = difference
                where = f" ({one.prompt.source}, token {position}: {logprob:.6f}, then {new_logprob:.6f})"
            if token != new_token:
                parted += 1
                break
    return ResponseDiff(largest, compared, parted, where)


def check_adapters(
    adapters: EngineAdapters | None, generate: Generate, arch: ArchSpec, rollout: RolloutConfig, version: int
) -> None:
    """Collective over the job, after a weight sync: checks that the engine samples with its low-rank adapters.

    All adapters get the same number for a moment, which must change the log-probabilities. Another sync must follow.

    Args:
        adapters: Adapters of this rank's engine; None on a rank without one.
        generate: Function that wakes the engine, samples and lets it sleep.
        arch: Architecture of the model.
        rollout: Config section `rollout`.
        version: Version of the engine's weights.

    Raises:
        RuntimeError: The responses of some replica do not change; raised on every rank.
    """
    with raise_on_all_ranks():
        before = sample_responses(generate, arch, rollout)
        if adapters is not None:
            adapters.begin_update()
            adapters.fill(FILLING)
            adapters.finish_update(version)
        after = sample_responses(generate, arch, rollout)
        complete = len(before) == len(after) == NUM_PROMPTS
        if complete and not compare(before, after).largest:
            raise RuntimeError(
                f"Weight-sync self-test failed: other low-rank adapters did not change the output of "
                f"rollout.name={rollout.name}, so it samples from the model without adapters. Set "
                "actor.lora.merge=true, or use rollout.name=native."
            )


def check(
    refit: Callable[[], object],
    generate: Generate,
    arch: ArchSpec,
    rollout: RolloutConfig,
    device: torch.device,
) -> ResponseDiff | None:
    """Collective over the job, after a weight sync: syncs the same weights again and compares the responses.

    Args:
        refit: Function that syncs the same weights again.
        generate: Function that wakes the engine, samples and lets it sleep.
        arch: Architecture of the model.
        rollout: Config section `rollout`.
        device: Device of the engine, which determines the tolerance.

    Returns:
        Difference of the responses; None after a stop request.

    Raises:
        RuntimeError: The responses of some replica differ by more than rounding; raised on every rank.
    """
    with raise_on_all_ranks():
        before = sample_responses(generate, arch, rollout)
    refit()
    with raise_on_all_ranks():
        after = sample_responses(generate, arch, rollout)
    moved = None
    if len(before) == len(after) == NUM_PROMPTS:
        moved = compare(before, after)
    with raise_on_all_ranks():
        if moved is not None and not moved.within(tolerance_of(device)):
            raise RuntimeError(
                f"Weight-sync self-test failed: syncing the same weights twice changed the output of "
                f"rollout.name={rollout.name}: {moved}; expected at most {tolerance_of(device):g} nats. The engine "
                "loses a tensor, processes one twice, or reads old addresses, so its samples would not come from the "
                "actor. Use rollout.name=native, and find the cause with tools/accept_trtllm.py or "
                "tools/accept_vllm.py."
            )
    return moved
