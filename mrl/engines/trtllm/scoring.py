"""Log-probabilities of sampled tokens and their kept token ids, computed from the logits that the engine returns.

Truncation is defined in `algorithms/functional/sampling.py`; `logprob_probe.py` decides when logits are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithms.functional.sampling import keep_threshold, truncates
from mrl.engines._kept_tokens import KeptTokens, add_step
from mrl.engines.base import SamplingConfig
from mrl.errors import UserError

RAW = 1e-3
"""Relative tolerance between logits of two passes of one prompt, which differ only by kernels; doubling the temperature
would halve them.
"""


def is_truncated(sampling: SamplingConfig) -> bool:
    """Returns whether the sampling settings drop tokens."""
    return truncates(sampling.top_k, sampling.top_p, sampling.min_p)


@dataclass(frozen=True)
class Scored:
    """Scores of N sampled tokens.

    Attributes:
        logprobs_N: Log-probabilities under the sampling settings, nats, fp32.
        kept_NV: Mask of the kept token ids, bool.
        log_mass_N: Log of the kept ids' probability before renormalisation, nats.
    """

    logprobs_N: Tensor
    kept_NV: Tensor
    log_mass_N: Tensor


def score_tokens(logits_NV: Tensor, tokens_N: Tensor, sampling: SamplingConfig) -> Scored:
    """Computes log-probabilities, and the kept token ids over which they are normalised.

    The sampled token always counts as kept, since rounding may differ at the edge of a truncation.

    Args:
        logits_NV: Logits before temperature, without vocabulary padding.
        tokens_N: Sampled tokens, int64.
        sampling: Temperature and truncation.
    """
    logits_NV = logits_NV.float() / sampling.temperature
    own_N1 = logits_NV.gather(1, tokens_N[:, None])
    threshold_N = keep_threshold(logits_NV, sampling.top_k, sampling.top_p, sampling.min_p)
    whole_N = torch.logsumexp(logits_NV, 1)
    if threshold_N is None:
        kept_NV, mass_N = torch.ones_like(logits_NV, dtype=torch.bool), whole_N
    else:
        kept_NV = logits_NV >= torch.minimum(threshold_N[:, None], own_N1)
        mass_N = torch.logsumexp(logits_NV.masked_fill(~kept_NV, -torch.inf), 1)
    return Scored(own_N1.squeeze(1) - mass_N, kept_NV, mass_N - whole_N)


def score(logits_NV: Tensor, tokens_N: Tensor, sampling: SamplingConfig) -> Tensor:
    """Returns the log-probabilities of `score_tokens`, fp32 [N]."""
    return score_tokens(logits_NV, tokens_N, sampling).logprobs_N


def kept_steps(
    logits: Sequence[Tensor], tokens_BT: Tensor, lens: Sequence[int], vocab_size: int, sampling: SamplingConfig
) -> list[KeptTokens]:
    """Returns the kept token ids of each row's first tokens; see `score_steps` for the arguments."""
    found = [KeptTokens() for _ in lens]
    for step, rows in _running(lens):
        place = rows.to(logits[step].device)
        told = score_tokens(logits[step][place, :vocab_size], tokens_BT[rows, step].to(place.device), sampling)
        add_step(told.kept_NV, told.log_mass_N, [found[row] for row in rows.tolist()])
    return found


def score_steps(
    logits: Sequence[Tensor], tokens_BT: Tensor, lens: Sequence[int], vocab_size: int, sampling: SamplingConfig
) -> Tensor:
    """Returns the log-probabilities of each row's first tokens, fp32 [B, T] on the CPU; zero after them.

    Args:
        logits: Logits of each step, [B, padded vocabulary].
        tokens_BT: Sampled tokens, int64.
        lens: Number of tokens to score in each row.
        vocab_size: Size of the vocabulary without padding.
        sampling: Temperature and truncation.
    """
    found_BT = torch.zeros(tokens_BT.shape)
    for step, rows in _running(lens):
        part = logits[step][rows.to(logits[step].device), :vocab_size]
        found_BT[rows, step] = score(part, tokens_BT[rows, step].to(part.device), sampling).cpu()
    return found_BT


def _running(lens: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yields each step with the rows that sample a token in it."""
    for step in range(max(lens)):
        yield step, torch.tensor([row for row, length in enumerate(lens) if length > step])


def check_raw(logits: Tensor, hotter: Tensor) -> None:
    """Compares the first logits of one prompt at two temperatures.

    Args:
        logits: Logits at one temperature.
        hotter: Logits at twice that temperature.

    Raises:
        UserError: They differ, so the engine does not return its model's raw logits.
    """
    largest = float(logits.float().abs().max())
    if float((logits.float() - hotter.float()).abs().max()) > RAW * largest:
        raise UserError(
            "TensorRT-LLM's logits change with the temperature: they are not the model's raw logits, so the "
            "log-probabilities of sampled tokens cannot be computed from them. Use rollout.name=trtllm or native."
        )
