"""The section `algorithm.dpo`.

Owns its fields and defaults. What they do is `mrl/algorithms/dpo.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DpoConfig:
    """Of `algorithm.name=dpo`, with TRL's names."""

    loss_type: Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "apo_zero"] = "sigmoid"
    """Loss of a pair. sigmoid_norm and ipo divide each response's log ratio by its length."""
    beta: float = 0.1
    """How strongly the policy is held to the reference, above 0; of ipo it is the paper's tau."""
    label_smoothing: float = 0.0
    """Part of the pairs whose labels are taken to be the wrong way round, [0, 0.5); of robust."""
    sft_loss_weight: float = 0.0
    """Factor of the mean negative log-likelihood of the chosen responses' tokens, which is added to the loss."""
