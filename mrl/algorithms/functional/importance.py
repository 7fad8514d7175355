"""Log-ratios between two policies at the sampled tokens, clamped to stay finite."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 (as in verl): one broken token cannot give inf, and it gets no gradient."""


def at_least_fp32(values: Tensor) -> Tensor:
    """Returns the values in fp32, or unchanged if they are fp64."""
    return values if values.dtype == torch.float64 else values.float()


def log_ratio(logprobs_R: Tensor, old_logprobs_R: Tensor) -> Tensor:
    """Returns log(pi / pi_old) of each token, clamped to +-MAX_LOG_RATIO; beyond the clamp the gradient is zero.

    Args:
        logprobs_R: Log-probabilities in the numerator, nats; may require grad.
        old_logprobs_R: Log-probabilities in the denominator, nats; detached.

    Returns:
        Log-ratio [R] in fp32, or in fp64 if one of the inputs is.

    Raises:
        ValueError: The shapes differ (broadcasting would hide a mistake).
    """
    if logprobs_R.shape != old_logprobs_R.shape:
        raise ValueError(
            f"log-ratio of shapes {tuple(logprobs_R.shape)} and {tuple(old_logprobs_R.shape)}: "
            "both must have one entry for each response token."
        )
    return (at_least_fp32(logprobs_R) - at_least_fp32(old_logprobs_R.detach())).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
