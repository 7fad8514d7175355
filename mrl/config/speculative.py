"""The section `rollout.speculative`, with the words of vLLM's `speculative_config`.

Owns its fields and defaults. What they do is an engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional


@dataclass(frozen=True)
class SpeculativeConfig:
    """Tokens that are drafted from what was said before and verified in one forward: the same tokens, sooner."""

    method: Optional[Literal["ngram"]] = None
    """ngram: the end of a sequence is looked for earlier in it, and in other samples of its prompt; what followed there
    is drafted. null: one token at a time."""
    num_speculative_tokens: int = 8
    """Most tokens that are drafted for a sequence at a time."""
    prompt_lookup_max: int = 5
    """Longest end of a sequence that is looked for, tokens; the longest that is found counts."""
    prompt_lookup_min: int = 2
    """Shortest."""
