"""Loss aggregation: the weight of each token in the loss, from counts over the global minibatch.

The loss is sum(weights_R * loss_R) over all microbatches and data-parallel ranks, so it does not depend on how the
minibatch was split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


def token_weights(
    mask_R: Tensor,
    sequence_R: Tensor,
    num_sequences: int,
    mode: Aggregation,
    reduce: Callable[[Tensor], Tensor],
    *,
    norm_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Collective over data-parallel: returns the token weights of the loss and of the metrics.

    With m the mask, N the trained tokens and S the sequences with at least one trained token (both global), n_s the
    trained tokens of sequence s and L = `norm_length`:

    - token_mean: m / N (DAPO);
    - seq_mean_token_mean: m / (n_s S) (GRPO);
    - seq_mean_token_sum: m / S (a sequence's log-probability is the sum of its tokens', as in RLOO);
    - seq_mean_token_sum_norm: m / (L S) (Dr.GRPO: a constant instead of the response's length).

    Args:
        mask_R: True where the token is trained.
        sequence_R: Index of each token's sequence, 0 .. num_sequences - 1.
        num_sequences: Number of sequences on this rank, may be 0.
        mode: Aggregation mode, see above.
        reduce: Elementwise sum over the data-parallel ranks; called once.
        norm_length: Divisor of seq_mean_token_sum_norm, tokens, above 0.

    Returns:
        Loss weights, and metric weights m / N in every mode; fp32, all zero if no token of the global minibatch is
        trained.

    Raises:
        ValueError: The mode is unknown, or seq_mean_token_sum_norm has no `norm_length`.
    """
    mask_R = mask_R.double()
    lens_B = torch.zeros(num_sequences, dtype=torch.float64, device=mask_R.device).index_add_(0, sequence_R, mask_R)
    counts = reduce(torch.stack([lens_B.sum(), (lens_B > 0).sum().double()]))
    num_tokens, num_trained_sequences = counts.clamp(min=1.0).unbind()
    metric_weights_R = mask_R / num_tokens
    if mode == "token_mean":
        weights_R = metric_weights_R
    elif mode == "seq_mean_token_mean":
        weights_R = mask_R / (lens_B.clamp(min=1.0)[sequence_R] * num_trained_sequences)
    elif mode == "seq_mean_token_sum":
        weights_R = mask_R / num_trained_sequences
    elif mode == "seq_mean_token_sum_norm":
        if norm_length is None or norm_length < 1:
            raise ValueError(f"seq_mean_token_sum_norm needs norm_length of at least 1 token, got {norm_length}.")
        weights_R = mask_R / (norm_length * num_trained_sequences)
    else:
        raise ValueError(f"loss aggregation '{mode}' is unknown, expected one of {', '.join(get_args(Aggregation))}.")
    return weights_R.float(), metric_weights_R.float()
