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

from mrl.algorithms.functional.sampling import keep_threshold
from mrl.engines.base import SamplingConfig

PLAIN = SamplingConfig(n=1, max_tokens=1, ignore_eos=True)
CUT = SamplingConfig(n=1, max_tokens=1, temperature=0.7, top_k=50, top_p=0.9, ignore_eos=True)

TOLERANCE = 0.02
"""Nats between the two, where both keep a token: two forwards of one prompt. What another distribution would be off by
is 0.1 and more (temperature 0.7, a tenth cut)."""

EDGE = 0.02
"""Probability of tokens that one keeps and the other drops, but for those at the very edge. bfloat16 often has equal
logits there: at the edge of top_p vLLM keeps as many as it takes and mrl all; at the edge of top_k vLLM's code for CPUs
counts all of them before it applies top_p, that for GPUs and mrl only `top_k`."""


def row(entry: Mapping[int, Any], vocab_size: int) -> Tensor:
    """Log-probabilities of all tokens from vLLM's answer for one position; -inf where it has none, fp32 [V]."""
    found = torch.full((vocab_size,), -math.inf)
    for token, value in entry.items():
        if 0 <= token < vocab_size:
            found[token] = value.logprob
    return found


def expected(plain_V: Tensor) -> Tensor:
    """What `CUT` makes of a distribution, log-probabilities [V]."""
    logits_V = plain_V / CUT.temperature
    return logits_V.masked_fill(logits_V < _threshold(logits_V, CUT.top_k), -math.inf).log_softmax(0)


def _threshold(logits_V: Tensor, top_k: int) -> float:
    """The smallest logit that is kept."""
    found = keep_threshold(logits_V[None], top_k, CUT.top_p, CUT.min_p)
    return -math.inf if found is None else float(found)


def check(plain_V: Tensor, cut_V: Tensor) -> None:
    """Returns where `cut_V` is the contract's distribution.

    Raises:
        RuntimeError: It is another.
    """
    logits_V, kept_V = plain_V / CUT.temperature, torch.isfinite(cut_V)
    smallest = logits_V.topk(min(CUT.top_k, len(logits_V))).values[-1]
    lost_V = ~kept_V & (logits_V > _threshold(logits_V, CUT.top_k) + TOLERANCE)
    strange_V = kept_V & (logits_V < _threshold(logits_V, int((logits_V >= smallest).sum())) - TOLERANCE)
    edge = float(expected(plain_V).exp()[lost_V].sum() + cut_V.exp()[strange_V].sum())
    wanted_V = logits_V.masked_fill(~kept_V, -math.inf).log_softmax(0)
    apart = float((wanted_V - cut_V)[kept_V].abs().max()) if kept_V.any() else math.inf
    if not (apart <= TOLERANCE and edge <= EDGE):
        raise RuntimeError(
            "vLLM's log-probabilities are not those of what it samples from: at temperature "
            f"{CUT.temperature}, top_k {CUT.top_k}, top_p {CUT.top_p} they are off by {apart:.3g} nats, and tokens of "
            f"probability {edge:.3g} are kept by one and dropped by the other. Use rollout.name=native."
        )
