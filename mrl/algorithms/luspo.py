"""LUSPO: GSPO with each sequence weighted by its length.

Source: arXiv 2602.05261. In GSPO all sequences have the same weight, so each token of a long one counts less; here each
sequence's loss is multiplied by its length.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mrl.algorithms.gspo import Gspo


class Luspo(Gspo):
    """GSPO's advantages and ratio; loss summed over the tokens of a sequence instead of averaged."""

    defaults: ClassVar[dict[str, Any]] = Gspo.defaults | {
        "loss_aggregation": "seq_mean_token_sum",
        "policy_loss": "luspo",
    }


ALGORITHM = Luspo
