"""Host memory of the logits that TensorRT-LLM returns with a response, and the number of requests that fit.

Every rank of a replica allocates a pinned buffer for each request, as long as its longest response
(`_torch/pyexecutor/llm_request.py: LogitsStorage`).
"""

from __future__ import annotations

from psutil import virtual_memory

from mrl.engines.base import SamplingConfig
from mrl.errors import UserError

HOST_PART = 0.25
"""Fraction of the host's free memory for the logits of all its ranks; offloaded optimizer state may need the rest."""

ITEM_BYTES = 4
"""Bytes per logit, at most fp32."""

EXTRA_STEPS = 1
"""Extra decoding steps of the overlap scheduler."""


def requests_at_a_time(sampling: SamplingConfig, vocab_size: int, *, most: int, ranks: int) -> int:
    """Returns how many requests may have buffered logits at the same time.

    Args:
        sampling: Settings of the requests.
        vocab_size: Number of logits per token.
        most: Upper limit, `rollout.max_num_seqs`.
        ranks: Number of ranks that share the host.

    Raises:
        UserError: The logits of a single request do not fit.
    """
    row_bytes = (sampling.max_tokens + EXTRA_STEPS) * vocab_size * ITEM_BYTES
    own_bytes = int(virtual_memory().available * HOST_PART) // ranks
    if row_bytes > own_bytes:
        raise UserError(
            f"the logits of one response take {row_bytes} bytes of host memory, but each of the host's {ranks} ranks "
            f"may use only {own_bytes}. Shorten rollout.response_length, or avoid logits: set "
            "rollout.top_k=-1 top_p=1 and min_p=0, or train on the actor's own log-probabilities: "
            "algorithm.rollout_correction.bypass_mode=false, no rollout_is or rollout_rs."
        )
    return min(most, own_bytes // row_bytes)
