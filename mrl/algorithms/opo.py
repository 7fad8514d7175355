"""OPO: the baseline of a group is its mean reward weighted by the lengths of the responses, without deviation.

Source: arXiv 2505.23585. The paper trains exactly on policy (one optimizer step per batch: `train.minibatch_size=null`)
and without KL and entropy terms. verl's `opo` has these advantages with any loss.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from mrl.algorithms.base import Outcomes
from mrl.algorithms.functional.advantages import length_weighted
from mrl.algorithms.grpo import Grpo


class Opo(Grpo):
    """Advantage R - sum(l R) / sum(l) over the group, l the number of sampled tokens of a response."""

    unused = frozenset({"advantage_std", "advantage_eps", "advantage_std_over"})
    defaults: ClassVar[dict[str, Any]] = Grpo.defaults | {"loss_aggregation": "token_mean"}

    def outcome_advantages(self, outcomes: Outcomes) -> Tensor:
        """Returns the advantages over the length-weighted mean, fp64 [N]."""
        sampled_N = outcomes.sampled_lens_N
        lens_N = outcomes.response_lens_N if sampled_N is None else sampled_N
        return length_weighted(outcomes.rewards_N, lens_N, outcomes.group_id_N, singleton=self.singleton)


ALGORITHM = Opo
