"""Samples tokens from logits and returns their log-probabilities, as `SamplingConfig` defines it.

The truncation is in `algorithms/functional/sampling.py`, sampling without truncation in `Operations.sample`. Each row
is computed alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algorithms.functional.sampling import keep_threshold, truncates
from mrl.engines.base import SamplingConfig
from mrl.engines.native.torch_ops import Operations


class TokenSampler:
    """Samples and scores tokens with one softmax.

    Args:
        sampling: Sampling distribution.
        operations: Operations that draw the tokens.
    """

    def __init__(self, sampling: SamplingConfig, operations: Operations) -> None:
        self._sampling = sampling
        self._operations = operations

    @torch.inference_mode()
    def sample(
        self, logits_NV: Tensor, keys_N: Tensor, counts_N: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Samples the next token of each row.

        Args:
            logits_NV: Logits of the true vocabulary, any dtype; fp32 logits are overwritten.
            keys_N: Random stream of each row, from `stream_key`.
            counts_N: Response tokens of each row so far.

        Returns:
            tokens_N int64 and logprobs_N fp32; a log-probability is not finite if the logits are not a distribution.
                With `return_kept_tokens` also the mask of kept tokens, bool [N, V], and the log of their probability
                mass before truncation [N].
        """
        sampling = self._sampling
        if not (sampling.return_kept_tokens or truncates(sampling.top_k, sampling.top_p, sampling.min_p)):
            whole = self._operations.sample
            tokens_N, logprobs_N = whole(logits_NV, keys_N, counts_N, sampling.temperature, greedy=sampling.greedy)
            return tokens_N, logprobs_N, None
        logits = logits_NV.float()
        if sampling.temperature != 1.0:
            logits = logits.div_(sampling.temperature)
        whole_N = logits.logsumexp(1) if sampling.return_kept_tokens else None
        threshold = keep_threshold(logits, sampling.top_k, sampling.top_p, sampling.min_p)
        if threshold is not None:
            logits = logits.masked_fill_(logits < threshold[:, None], -torch.inf)
        tokens_N, logprobs_N = self._operations.sample_kept(logits, keys_N, counts_N, greedy=sampling.greedy)
        kept = None if whole_N is None else (logits > -torch.inf, (logits.logsumexp(1) - whole_N).clamp_(max=0.0))
        return tokens_N, logprobs_N, kept
