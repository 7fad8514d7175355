"""What vLLM's log-probabilities score, asked of the running engine once.

Owns the probe: the whole distribution of one next token, plain and under temperature and truncation; the second must be
what the sampling contract makes of the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mrl.engines.base import SamplingConfig
from mrl.functional.sampling import keep_threshold

PLAIN = SamplingConfig(n=1, max_tokens=1, ignore_eos=True)
CUT = SamplingConfig(n=1, max_tokens=1, temperature=0.7, top_k=50, top_p=0.9, ignore_eos=True)

TOLERANCE = 0.02
"""Nats between the two, where both keep a token: two forwards of one prompt. What another distribution would be off by
is 0.1 and more (temperature 0.7, a tenth cut)."""

EDGE = 0.02
"""Probability of tokens that rounding may keep in one and drop in the other, at the edge of what is kept."""


def row(entry: Mapping[int, Any], vocab_size: int) -> Tensor:
    """Log-probabilities of all tokens from vLLM's answer for one position; -inf where it has none, fp32 [V]."""
    found = torch.full((vocab_size,), -math.inf)
    for token, value in entry.items():
        if 0 <= token < vocab_size:
            found[token] = value.logprob
    return found


def expected(plain_V: Tensor) -> Tensor:
    """What `CUT` makes of a distribution, log-probabilities [V]."""
    logits_1V = plain_V[None] / CUT.temperature
    threshold = keep_threshold(logits_1V, CUT.top_k, CUT.top_p, CUT.min_p)
    if threshold is not None:
        logits_1V = logits_1V.masked_fill(logits_1V < threshold[:, None], -math.inf)
    return logits_1V.log_softmax(1)[0]


def check(plain_V: Tensor, cut_V: Tensor) -> None:
    """Returns where `cut_V` is the contract's distribution.

    Raises:
        RuntimeError: It is another.
    """
    wanted_V = expected(plain_V)
    both = torch.isfinite(wanted_V) & torch.isfinite(cut_V)
    apart = float((wanted_V - cut_V)[both].abs().max()) if both.any() else math.inf
    edge = float(wanted_V[~both].exp().sum() + cut_V[~both].exp().sum())
    if not (apart <= TOLERANCE and edge <= EDGE):
        raise RuntimeError(
            "vLLM's log-probabilities are not those of what it samples from: at temperature "
            f"{CUT.temperature}, top_k {CUT.top_k}, top_p {CUT.top_p} they are off by {apart:.3g} nats, and tokens of "
            f"probability {edge:.3g} are kept by one and dropped by the other. Use rollout.name=native."
        )
