"""Log-probabilities of sampled tokens under the sampling contract, from the logits that an engine returns.

Owns that formula; truncation is that of `functional/sampling.py`, as in the trainer. When it is needed, `contract.py`
says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.engines.base import SamplingConfig
from mrl.errors import UserError
from mrl.functional.sampling import keep_threshold

RAW = 1e-3
"""Relative: two passes of one prompt, whose logits differ by kernels at most; a doubled temperature halves them."""


def is_truncated(sampling: SamplingConfig) -> bool:
    """Whether the contract drops tokens."""
    return sampling.top_k >= 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def score(logits_NV: Tensor, tokens_N: Tensor, sampling: SamplingConfig) -> Tensor:
    """Log-probabilities in nats, fp32 [N].

    The sampled token counts as kept, as in the trainer: at the edge of a truncation roundings may differ.

    Args:
        logits_NV: Before temperature, true vocabulary only.
        tokens_N: Sampled tokens, int64.
        sampling: Temperature and truncation.
    """
    logits_NV = logits_NV.float() / sampling.temperature
    own_N1 = logits_NV.gather(1, tokens_N[:, None])
    threshold_N = keep_threshold(logits_NV, sampling.top_k, sampling.top_p, sampling.min_p)
    if threshold_N is not None:
        logits_NV = logits_NV.masked_fill(logits_NV < torch.minimum(threshold_N[:, None], own_N1), -torch.inf)
    return own_N1.squeeze(1) - torch.logsumexp(logits_NV, 1)


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
    for step in range(max(lens)):
        rows = torch.tensor([row for row, length in enumerate(lens) if length > step])
        part = logits[step][rows.to(logits[step].device), :vocab_size]
        found_BT[rows, step] = score(part, tokens_BT[rows, step].to(part.device), sampling).cpu()
    return found_BT


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
