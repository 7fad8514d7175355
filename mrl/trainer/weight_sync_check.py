"""Does a refit of the weights that an engine holds leave it as it is: asked once, before its samples train anything.

Owns the question and the verdict. `Refit` proves that the engine was given the right bytes; an engine that cuts, fuses
or rearranges them itself, or that reads them through addresses of its own (CUDA graphs), can still go wrong behind it.
So a few fixed prompts are answered greedily after one refit, and again after a second one of the same weights, with
sleep and waking in between: neither tokens nor log-probabilities may move. What goes wrong in the same way every time,
such as a tensor that is never read, does not move: `tools/accept_trtllm.py` and `tools/accept_vllm.py` look for that,
with the actor's own log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mrl.config.config import RolloutConfig
from mrl.distributed.collectives import together
from mrl.engines.base import SamplingConfig
from mrl.engines.trtllm.fields import ENGINES as TRTLLM
from mrl.engines.vllm.fields import NAME as VLLM
from mrl.models.base import ArchSpec
from mrl.types import Prompt, Rollout

NUM_PROMPTS = 4
PROMPT_LEN = 8
MAX_TOKENS = 16
"""Of a response, and most of it: longer ones move no less."""

STRIDE = 7919
"""A prime: successive tokens lie far apart in any vocabulary."""

EXACT = 0.0
"""On a CPU the same kernels add in the same order: nothing may move."""

ROUNDING = 0.05
"""Nats, on a GPU. Each prompt is alone in its batch, so that kernels are the same and only the order of atomic sums may
differ; bfloat16 logits carry 8 bits, and a log-probability of -12 is good to 2^-8 of that."""

Generate = Callable[[Sequence[Prompt], SamplingConfig], list[Rollout]]


@dataclass(frozen=True)
class Movement:
    """How the answers of two refits differ.

    Attributes:
        largest: Largest difference of two log-probabilities up to where tokens part, nats.
        num_compared: Tokens up to there, over all prompts.
        num_parted: Prompts whose tokens part.
        where: Of the largest difference, in words.
    """

    largest: float
    num_compared: int
    num_parted: int
    where: str

    def within(self, tolerance: float) -> bool:
        """Whether this is rounding. At most half of the prompts may part, and only between tokens equally likely."""
        allowed = NUM_PROMPTS // 2 if tolerance > 0 else 0
        return self.largest <= tolerance and self.num_parted <= allowed  # not-a-number is not within

    def __str__(self) -> str:
        return (
            f"{self.num_compared} tokens compared, the log-probabilities moved by at most {self.largest:.3g} nats"
            f"{self.where}, the tokens of {self.num_parted} of {NUM_PROMPTS} prompts parted"
        )


def is_wanted(rollout: RolloutConfig) -> bool:
    """Whether the run asks; with TensorRT-LLM's engines and vLLM it does unless told not to."""
    asked = rollout.checkpoint_engine.canary
    return rollout.name in (*TRTLLM, VLLM) if asked is None else asked


def tolerance_of(device: torch.device) -> float:
    """Largest movement that is rounding, nats."""
    return EXACT if device.type == "cpu" else ROUNDING


def prompts_of(arch: ArchSpec, rollout: RolloutConfig) -> list[Prompt]:
    """The fixed prompts of a model, token ids all over its vocabulary."""
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
    """Greedy, at temperature 1 and without truncation: every engine scores that exactly."""
    room = rollout.longest - min(PROMPT_LEN, rollout.prompt_length)
    return SamplingConfig(n=1, max_tokens=min(MAX_TOKENS, rollout.response_length, room), greedy=True, ignore_eos=True)


def answers(generate: Generate, arch: ArchSpec, rollout: RolloutConfig) -> list[Rollout]:
    """Collective over the replica: what the engine makes of the fixed prompts, each alone in its batch.

    Returns:
        One for each prompt; fewer where the engine was told to stop.
    """
    sampling = sampling_of(rollout)
    return [found for prompt in prompts_of(arch, rollout) for found in generate([prompt], sampling)]


def compare(before: Sequence[Rollout], after: Sequence[Rollout]) -> Movement:
    """How far the answers moved, token by token until they part."""
    largest, where, compared, parted = 0.0, "", 0, 0
    for one, other in zip(before, after, strict=True):
        pairs = zip(one.response_ids, other.response_ids, one.rollout_logprobs, other.rollout_logprobs, strict=True)
        for position, (token, new_token, logprob, new_logprob) in enumerate(pairs):
            compared += 1
            moved = abs(new_logprob - logprob)
            if moved > largest or math.isnan(moved) > math.isnan(largest):
                largest = moved
                where = f" ({one.prompt.source}, token {position}: {logprob:.6f}, then {new_logprob:.6f})"
            if token != new_token:
                parted += 1
                break
    return Movement(largest, compared, parted, where)


def check(
    refit: Callable[[], object],
    generate: Generate,
    arch: ArchSpec,
    rollout: RolloutConfig,
    device: torch.device,
) -> Movement | None:
    """Collective over the job, after a first refit: refits the same weights, and compares before with after.

    Args:
        refit: The weights that the engine holds, once more.
        generate: Wakes the engine, samples and lets it sleep again.
        arch: The model.
        rollout: `rollout` section.
        device: Of the engine.

    Returns:
        How far the answers moved; None where the engine was told to stop.

    Raises:
        RuntimeError: On every rank: they moved by more than rounding on some replica.
    """
    with together():
        before = answers(generate, arch, rollout)
    refit()
    with together():
        after = answers(generate, arch, rollout)
    moved = None
    if len(before) == len(after) == NUM_PROMPTS:
        moved = compare(before, after)
    with together():
        if moved is not None and not moved.within(tolerance_of(device)):
            raise RuntimeError(
                f"the engine moved under a refit of the very weights that it held: {moved}; expected at most "
                f"{tolerance_of(device):g} nats. rollout.name={rollout.name} does not keep what it is given (a tensor "
                "lost, one processed twice, or kernels that read old addresses), and its samples would not be the "
                "actor's. rollout.name=native does; tools/accept_trtllm.py or tools/accept_vllm.py says what fails."
            )
    return moved
