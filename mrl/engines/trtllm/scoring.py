"""Log-probabilities of sampled tokens under the sampling contract, and what truncation kept, from returned logits.

Owns that formula; truncation is that of `algorithms/functional/sampling.py`. When it is needed, `logprob_probe.py`
says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithms.functional.sampling import keep_threshold, truncates
from mrl.engines._kept_tokens import Kept, add_step
from mrl.engines.base import SamplingConfig
from mrl.errors import UserError

RAW = 1e-3
"""Relative: two passes of one prompt, whose logits differ by kernels at most; a doubled temperature halves them."""


def is_truncated(sampling: SamplingConfig) -> bool:
    """Whether the contract drops tokens."""
    return truncates(sampling.top_k, sampling.top_p, sampling.min_p)


@dataclass(frozen=True)
class Scored:
    """Of N sampled tokens.

    Attributes:
        logprobs_N: Under the contract, nats, fp32.
        kept_NV: What truncation keeps, bool.
        log_mass_N: Log of its probability before the cut, nats.
    """

    logprobs_N: Tensor
    kept_NV: Tensor
    log_mass_N: Tensor


def scored(logits_NV: Tensor, tokens_N: Tensor, sampling: SamplingConfig) -> Scored:
    """Log-probabilities and what they are normalised over.

    The sampled token counts as kept: at the edge of a truncation roundings may differ.

    Args:
        logits_NV: Before temperature, true vocabulary only.
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
    """The log-probabilities of `scored`, fp32 [N]."""
    return scored(logits_NV, tokens_N, sampling).logprobs_N


def kept_steps(
    logits: Sequence[Tensor], tokens_BT: Tensor, lens: Sequence[int], vocab_size: int, sampling: SamplingConfig
) -> list[Kept]:
    """What truncation keeps of each row's first tokens; arguments as of `score_steps`."""
    found = [Kept() for _ in lens]
    for step, rows in _running(lens):
        place = rows.to(logits[step].device)
        told = scored(logits[step][place, :vocab_size], tokens_BT[rows, step].to(place.device), sampling)
        add_step(told.kept_NV, told.log_mass_N, [found[row] for row in rows.tolist()])
    return found


def score_steps(
    logits: Sequence[Tensor], tokens_BT: Tensor, lens: Sequence[int], vocab_size: int, sampling: SamplingConfig
) -> Tensor:
    """`score` of each row's first tokens, fp32 [B, T] on the CPU; zero behind them.

    Args:
        logits: Of each step, [B, padded vocabulary].
        tokens_BT: Sampled tokens, int64.
        lens: Tokens of each row that are scored.
        vocab_size: Columns that are tokens.
        sampling: Temperature and truncation.
    """
    found_BT = torch.zeros(tokens_BT.shape)
    for step, rows in _running(lens):
        part = logits[step][rows.to(logits[step].device), :vocab_size]
        found_BT[rows, step] = score(part, tokens_BT[rows, step].to(part.device), sampling).cpu()
    return found_BT


def _running(lens: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Steps, with the rows that take a token there."""
    for step in range(max(lens)):
        yield step, torch.tensor([row for row, length in enumerate(lens) if length > step])


def check_raw(logits: Tensor, hotter: Tensor) -> None:
    """Compares the first logits of one prompt at two temperatures.

    Raises:
        UserError: They differ: the engine returns something else than its model's logits.
    """
    largest = float(logits.float().abs().max())
    if float((logits.float() - hotter.float()).abs().max()) > RAW * largest:
        raise UserError(
            "TensorRT-LLM's logits change with the temperature: they are not the model's, and the log-probabilities of "
            "sampled tokens cannot be computed from them. Choose rollout.name=trtllm or native."
        )
