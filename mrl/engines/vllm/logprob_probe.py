"""Checks once, on the running engine, that vLLM's log-probabilities belong to the distribution that it samples from.

Requests the complete distribution of one next token, with and without temperature and truncation; the former must
follow from the latter as `SamplingConfig` defines it.
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
"""Difference of log-probabilities, nats, for tokens that both keep (two forwards of one prompt). A different
distribution would differ by 0.1 or more (temperature 0.7, a tenth truncated)."""

EDGE = 0.02
"""Probability of tokens that only one of both keeps, except for those at the very edge. bfloat16 logits are often equal
there: at the edge of top_p vLLM keeps as many as needed, mrl all; at the edge of top_k vLLM's CPU code counts all of
them before it applies top_p, its GPU code and mrl only `top_k`."""


def row(entry: Mapping[int, Any], vocab_size: int) -> Tensor:
    """Returns the log-probabilities [V] of one position of vLLM's output, fp32; -inf for tokens that it lacks."""
    found = torch.full((vocab_size,), -math.inf)
    for token, value in entry.items():
        if 0 <= token < vocab_size:
            found[token] = value.logprob
    return found


def expected(plain_V: Tensor) -> Tensor:
    """Returns the log-probabilities [V] that `CUT` gives for an untruncated distribution."""
    logits_V = plain_V / CUT.temperature
    return logits_V.masked_fill(logits_V < _threshold(logits_V, CUT.top_k), -math.inf).log_softmax(0)


def _threshold(logits_V: Tensor, top_k: int) -> float:
    """Returns the smallest kept logit."""
    found = keep_threshold(logits_V[None], top_k, CUT.top_p, CUT.min_p)
    return -math.inf if found is None else float(found)


def check(plain_V: Tensor, cut_V: Tensor) -> None:
    """Checks that `cut_V` is the truncated distribution of `plain_V`.

    Raises:
        RuntimeError: It is another one.
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
            "vLLM's log-probabilities do not belong to the distribution that it samples from: at temperature "
            f"{CUT.temperature}, top_k {CUT.top_k}, top_p {CUT.top_p} they differ by {apart:.3g} nats, and tokens of "
            f"probability {edge:.3g} are kept on one side only. Use rollout.name=native."
        )
