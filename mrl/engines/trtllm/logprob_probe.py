"""Which distribution the engine's log-probabilities score, found out by asking it, and what follows for a setting.

Owns the probe and the decision: log-probabilities are taken as they are where they are exact, computed from returned
logits where they are not, and a setting is refused where neither is possible. Nothing here assumes what a version of
TensorRT-LLM does: 1.2's two samplers score different distributions, and 1.3 can be asked for either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from mrl.algorithms.functional.sampling import keep_threshold
from mrl.config.config import RolloutConfig
from mrl.engines.base import SamplingConfig
from mrl.engines.trtllm.scoring import Scored, is_truncated, score, scored
from mrl.errors import UserError

TOLERANCE = 0.02
"""Nats: logits that come back in bfloat16 differ from those that were scored by at most 2^-8 of their size."""

EDGE = 0.1
"""A sampled token this far below what truncation keeps, in logits, was not truncated at all."""

PROBE_TOKENS = 16

CUT = SamplingConfig(n=1, max_tokens=PROBE_TOKENS, temperature=0.5, top_p=0.7, ignore_eos=True)
"""Far from temperature 1 and cut, so that the distributions differ by more than `TOLERANCE` on some token."""

HOT = SamplingConfig(n=1, max_tokens=PROBE_TOKENS, temperature=2.0, ignore_eos=True)
"""Samples that are often not the most likely token: is their own log-probability there?"""


class Scores(Enum):
    """What a reported log-probability is the log-softmax of."""

    RAW = "logits"
    TEMPERED = "logits / temperature"
    PROCESSED = "logits / temperature, cut by top_k, top_p and min_p"
    UNVERIFIED = "a distribution that could not be found out"
    UNKNOWN = "nothing that could be recognised"


DISTRIBUTIONS: dict[Scores, Callable[[SamplingConfig], SamplingConfig]] = {
    Scores.RAW: lambda under: replace(under, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0),
    Scores.TEMPERED: lambda under: replace(under, top_k=-1, top_p=1.0, min_p=0.0),
    Scores.PROCESSED: lambda under: under,
}
"""What a setting's samples are scored under."""


@dataclass(frozen=True)
class Verdict:
    """What the probe found.

    Attributes:
        scores: Of the engine's log-probabilities.
        has_logits: The engine returns the logits of each token, also where a response ends early.
    """

    scores: Scores
    has_logits: bool


@dataclass(frozen=True)
class Answer:
    """One response to a probe.

    Attributes:
        under: What it was asked for.
        tokens: Sampled.
        reported: The engine's log-probabilities, one for each token; None: it gave none for a sampled token.
        logits_TV: What it returned, true vocabulary; None: nothing.
    """

    under: SamplingConfig
    tokens: list[int]
    reported: list[float] | None
    logits_TV: Tensor | None


def judge(answers: Sequence[Answer]) -> Scores:
    """Compares an engine's log-probabilities with those of each distribution, computed from its logits."""
    if any(answer.reported is None for answer in answers):
        return Scores.UNKNOWN
    if any(answer.logits_TV is None for answer in answers):
        return Scores.UNVERIFIED
    near = [each for each in DISTRIBUTIONS if all(apart(answer, each) <= TOLERANCE for answer in answers)]
    if len(near) > 1:  # the model is so flat, or so sure, that they do not differ here
        return Scores.UNVERIFIED
    return near[0] if near else Scores.UNKNOWN


def apart(answer: Answer, scores: Scores) -> float:
    """Largest difference of an answer's log-probabilities from those of a distribution, nats; infinite without them."""
    if answer.logits_TV is None or answer.reported is None:
        return math.inf
    ids = torch.tensor(answer.tokens, dtype=torch.int64, device=answer.logits_TV.device)
    found = torch.tensor(answer.reported, dtype=torch.float32, device=answer.logits_TV.device)
    expected = score(answer.logits_TV, ids, DISTRIBUTIONS[scores](answer.under))
    return float((expected - found).abs().max())


def is_trained_on(sampling: SamplingConfig, config: RolloutConfig) -> bool:
    """Whether samples of this setting are the run's, and no evaluation's: whose log-probabilities nothing reads."""
    own = (config.temperature, config.top_k, config.top_p, config.min_p, not config.do_sample)
    return own == (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.greedy)


def is_exact(scores: Scores, sampling: SamplingConfig) -> bool:
    """Whether the engine's log-probabilities are those of the sampling contract."""
    plain = not is_truncated(sampling)
    if sampling.greedy:  # the engine is told top_k=1, which the contract does not score
        return plain and (scores is Scores.TEMPERED or (scores is Scores.RAW and sampling.temperature == 1.0))
    if plain and sampling.temperature == 1.0:
        return scores is not Scores.UNKNOWN  # without temperature and truncation all of them are the same
    return scores is Scores.PROCESSED or (plain and scores is Scores.TEMPERED)


def needs_logits(verdict: Verdict, sampling: SamplingConfig, *, trained: bool) -> bool:
    """Whether log-probabilities, or what was kept, must be computed from logits under this setting.

    Args:
        verdict: Of the probe.
        sampling: The setting.
        trained: Whether anything reads the log-probabilities; otherwise those of the engine do.

    Raises:
        UserError: They must, and the engine returns none.
    """
    if not sampling.with_support and (not trained or is_exact(verdict.scores, sampling)):
        return False
    if verdict.has_logits:
        return True
    if sampling.with_support:
        raise UserError(
            f"TensorRT-LLM does not tell which tokens top_k={sampling.top_k} top_p={sampling.top_p} "
            f"min_p={sampling.min_p} kept, and returns no logits to tell them by: the actor could not score the "
            "samples over the same tokens. Set rollout.top_k=-1, top_p=1 and min_p=0 (evaluations may truncate: "
            "rollout.val_kwargs), or use rollout.name=native or vllm."
        )
    raise UserError(
        f"TensorRT-LLM's log-probabilities score {verdict.scores.value}, and it returns no logits to correct them. "
        f"With temperature={sampling.temperature} top_k={sampling.top_k} top_p={sampling.top_p} min_p={sampling.min_p} "
        "they would not be those of the policy that sampled. Set temperature=1, top_k=-1, top_p=1 and min_p=0, or "
        "train on the actor's own log-probabilities: algorithm.rollout_correction.bypass_mode=false, no rollout_is or "
        "rollout_rs."
    )


def corrected(logits_TV: Tensor, tokens: list[int], sampling: SamplingConfig) -> Scored:
    """Log-probabilities under the contract, and what it keeps.

    Args:
        logits_TV: Of the sampled tokens, true vocabulary.
        tokens: Sampled.
        sampling: What they were sampled under.

    Raises:
        RuntimeError: A token lies outside of what truncation keeps: the engine did not sample as it was told.
    """
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits_TV.device)
    tempered = logits_TV.float() / sampling.temperature
    threshold_T = keep_threshold(tempered, sampling.top_k, sampling.top_p, sampling.min_p)
    if threshold_T is not None:
        own_T = tempered.gather(1, ids[:, None]).squeeze(1)
        outside = (own_T < threshold_T - EDGE).nonzero().flatten().tolist()
        if outside:
            raise RuntimeError(
                f"response token {outside[0]} ({tokens[outside[0]]}) is none that top_k={sampling.top_k} "
                f"top_p={sampling.top_p} min_p={sampling.min_p} keep: TensorRT-LLM did not sample as it was told"
            )
    return scored(logits_TV, ids, sampling)
