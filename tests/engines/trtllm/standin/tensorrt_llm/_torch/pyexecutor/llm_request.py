"""The logits that a request returns, and the host memory that they take.

As `llm_request.py: LogitsStorage` has them: on the first token a request gets a pinned buffer for as many tokens as it
may sample; logits come to it in chunks of 8 steps. The overlap scheduler runs one step too many where a response ends
before its length, and then leaves out the whole last chunk.
"""

CHUNK = 8
ITEM_BYTES = 4

pinned_peak = 0
"""Most bytes of such buffers at a time."""


def pin(params, vocab_size, overlap):
    """Allocates the buffers of requests that run together."""
    global pinned_peak  # noqa: PLW0603
    tokens = sum(each.max_tokens + overlap for each in params if each.return_generation_logits)
    pinned_peak = max(pinned_peak, tokens * vocab_size * ITEM_BYTES)


def returned(logits_TV, *, ended_early, overlap):
    """[1, tokens, V], of as many tokens as are left; None: none are."""
    if not (overlap and ended_early):
        return logits_TV[None]
    steps = len(logits_TV) + 1
    chunks = [*range(CHUNK, steps, CHUNK), steps]
    return None if len(chunks) == 1 else logits_TV[None, : chunks[-2]]
