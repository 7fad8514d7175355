"""Probe of the distribution that the engine's log-probabilities score, and its consequences for sampling settings.

Log-probabilities are used unchanged where they are exact, computed from returned logits where they are not, and a
setting is rejected where neither is possible. Nothing is assumed about a version of TensorRT-LLM: 1.2's two samplers
score different distributions, and 1.3 can return either.
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
from mrl.engines.trtllm.scoring import Scored, is_truncated, score, score_tokens
from mrl.errors import UserError

TOLERANCE = 0.02
"""Tolerance in nats: logits returned in bfloat16 differ from the scored ones by a relative 2^-8 at most."""

EDGE = 0.1
"""Distance in logits below the truncation threshold at which a sampled token proves that truncation was not applied."""

PROBE_TOKENS = 16

TRUNCATED_PROBE = SamplingConfig(n=1, max_tokens=PROBE_TOKENS, temperature=0.5, top_p=0.7, ignore_eos=True)
"""Probe settings far from temperature 1 and truncated, so that the distributions differ by more than `TOLERANCE`."""

HIGH_TEMPERATURE_PROBE = SamplingConfig(n=1, max_tokens=PROBE_TOKENS, temperature=2.0, ignore_eos=True)
"""Probe settings that often sample an unlikely token, to check that its own log-probability is returned."""


class Scores(Enum):
    """Distribution whose log-softmax the engine reports."""

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
"""Sampling settings that describe each distribution, given those of the request."""


@dataclass(frozen=True)
class ProbeResult:
    """Result of the probe.

    Attributes:
        scores: Distribution of the engine's log-probabilities.
        has_logits: True if the engine returns the logits of each token, also where a response ends early.
    """

    scores: Scores
    has_logits: bool


@dataclass(frozen=True)
class ProbeResponse:
    """One response to a probe.

    Attributes:
        under: Sampling settings of the request.
        tokens: Sampled token ids.
        reported: The engine's log-probability of each token; None where one is missing.
        logits_TV: Returned logits without vocabulary padding; None where there are none.
    """

    under: SamplingConfig
    tokens: list[int]
    reported: list[float] | None
    logits_TV: Tensor | None


def identify_distribution(responses: Sequence[ProbeResponse]) -> Scores:
    """Returns the distribution that matches the engine's log-probabilities, computed from its logits."""
    if any(response.reported is None for response in responses):
        return Scores.UNKNOWN
    if any(response.logits_TV is None for response in responses):
        return Scores.UNVERIFIED
    near = [
        each for each in DISTRIBUTIONS if all(largest_difference(response, each) <= TOLERANCE for response in responses)
    ]
    if len(near) > 1:  # a very flat or very confident model, for which the distributions do not differ
        return Scores.UNVERIFIED
    return near[0] if near else Scores.UNKNOWN


def largest_difference(response: ProbeResponse, scores: Scores) -> float:
    """Returns the largest difference between a response's log-probabilities and a distribution, nats; else inf."""
    if response.logits_TV is None or response.reported is None:
        return math.inf
    ids = torch.tensor(response.tokens, dtype=torch.int64, device=response.logits_TV.device)
    found = torch.tensor(response.reported, dtype=torch.float32, device=response.logits_TV.device)
    expected = score(response.logits_TV, ids, DISTRIBUTIONS[scores](response.under))
    return float((expected - found).abs().max())


def is_trained_on(sampling: SamplingConfig, config: RolloutConfig) -> bool:
    """Returns whether samples of these settings are trained on; nothing reads the log-probabilities of evaluations."""
    own = (config.temperature, config.top_k, config.top_p, config.min_p, not config.do_sample)
    return own == (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.greedy)


def is_exact(scores: Scores, sampling: SamplingConfig) -> bool:
    """Returns whether the engine's log-probabilities are those of the policy under these sampling settings."""
    plain = not is_truncated(sampling)
    if sampling.greedy:  # the engine samples with top_k=1, but log-probabilities are over all tokens
        return plain and (scores is Scores.TEMPERED or (scores is Scores.RAW and sampling.temperature == 1.0))
    if plain and sampling.temperature == 1.0:
        return scores is not Scores.UNKNOWN  # without temperature and truncation all distributions are equal
    return scores is Scores.PROCESSED or (plain and scores is Scores.TEMPERED)


def needs_logits(verdict: ProbeResult, sampling: SamplingConfig, *, trained: bool) -> bool:
    """Returns whether log-probabilities or kept token ids must be computed from logits under these settings.

    Args:
        verdict: Result of the probe.
        sampling: Sampling settings of the request.
        trained: True if the log-probabilities are used; if not, those of the engine are good enough.

    Raises:
        UserError: Logits are needed, but the engine returns none.
    """
    if not sampling.return_kept_tokens and (not trained or is_exact(verdict.scores, sampling)):
        return False
    if verdict.has_logits:
        return True
    if sampling.return_kept_tokens:
        raise UserError(
            f"TensorRT-LLM does not report which tokens top_k={sampling.top_k} top_p={sampling.top_p} "
            f"min_p={sampling.min_p} kept, and returns no logits to compute them from: the actor could not score the "
            "samples over the same tokens. Set rollout.top_k=-1, top_p=1 and min_p=0 (evaluations may truncate: "
            "rollout.val_kwargs), or use rollout.name=native or vllm."
        )
    raise UserError(
        f"TensorRT-LLM's log-probabilities score {verdict.scores.value}, and it returns no logits to correct them. "
        f"With temperature={sampling.temperature} top_k={sampling.top_k} top_p={sampling.top_p} min_p={sampling.min_p} "
        "they would not be those of the sampling policy. Set temperature=1, top_k=-1, top_p=1 and min_p=0, or "
        "train on the actor's own log-probabilities: algorithm.rollout_correction.bypass_mode=false, no rollout_is or "
        "rollout_rs."
    )


def rescore(logits_TV: Tensor, tokens: list[int], sampling: SamplingConfig) -> Scored:
    """Returns log-probabilities and kept token ids computed from logits.

    Args:
        logits_TV: Logits of the sampled tokens, without vocabulary padding.
        tokens: Sampled token ids.
        sampling: Sampling settings of the request.

    Raises:
        RuntimeError: A token lies outside the truncation, so the engine did not apply the settings.
    """
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits_TV.device)
    tempered = logits_TV.float() / sampling.temperature
    threshold_T = keep_threshold(tempered, sampling.top_k, sampling.top_p, sampling.min_p)
    if threshold_T is not None:
        own_T = tempered.gather(1, ids[:, None]).squeeze(1)
        outside = (own_T < threshold_T - EDGE).nonzero().flatten().tolist()
        if outside:
            raise RuntimeError(
                f"response token {outside[0]} ({tokens[outside[0]]}) is outside top_k={sampling.top_k} "
                f"top_p={sampling.top_p} min_p={sampling.min_p}: TensorRT-LLM did not apply the sampling settings"
            )
    return score_tokens(logits_TV, ids, sampling)
