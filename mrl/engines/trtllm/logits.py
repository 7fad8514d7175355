"""The logits that TensorRT-LLM returns with a response: what they cost on the host, and how many responses that allows.

Every rank of a replica gets a pinned buffer for each request, as long as its longest response
(`_torch/pyexecutor/llm_request.py: LogitsStorage`).
"""

from __future__ import annotations

from psutil import virtual_memory

from mrl.engines.base import SamplingConfig
from mrl.errors import UserError

HOST_PART = 0.25
"""Of the host's free memory, for the logits of all its ranks together: the optimizer's state may come there too."""

ITEM_BYTES = 4
"""Of a logit: at most fp32."""

EXTRA_STEPS = 1
"""The overlap scheduler's."""


def requests_at_a_time(sampling: SamplingConfig, vocab_size: int, *, most: int, ranks: int) -> int:
    """How many requests may wait for their logits at a time.

    Args:
        sampling: Their setting.
        vocab_size: Columns.
        most: Of them anyway, `rollout.max_num_seqs`.
        ranks: That share the host.

    Raises:
        UserError: The logits of one request are too much.
    """
    row_bytes = (sampling.max_tokens + EXTRA_STEPS) * vocab_size * ITEM_BYTES
    own_bytes = int(virtual_memory().available * HOST_PART) // ranks
    if row_bytes > own_bytes:
        raise UserError(
            f"the logits of one response take {row_bytes} bytes of this host's memory, of which each of its {ranks} "
            f"ranks may take {own_bytes} for them. Shorten rollout.response_length, or need no logits: set "
            "rollout.top_k=-1 top_p=1 and min_p=0, or train on the actor's own log-probabilities: "
            "algorithm.rollout_correction.bypass_mode=false, no rollout_is or rollout_rs."
        )
    return min(most, own_bytes // row_bytes)
