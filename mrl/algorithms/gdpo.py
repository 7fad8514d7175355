"""GDPO: normalises each reward function separately within its group, so that none dominates the others.

Source: arXiv 2601.05242. The rewards are the functions of `reward.functions` whose weight is not 0, and the overlong
penalty.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from mrl.algorithms.base import Outcomes, required
from mrl.algorithms.functional.advantages import decoupled, informative_groups
from mrl.algorithms.grpo import Grpo


class Gdpo(Grpo):
    """Advantage of GRPO for each reward function, weighted and summed, then normalised over the batch.

    S = sum_f w_f (R_f - mean(R_f)) / (std(R_f) + eps) over the group; A = (S - mean(S)) / (std(S) + eps).
    """

    unused = frozenset({"advantage_std_over", "credit"})
    defaults: ClassVar[dict[str, Any]] = dict(Grpo.defaults)

    def informative_groups(self, outcomes: Outcomes) -> Tensor:
        """Returns which samples dynamic sampling keeps, bool [N]: some reward function's values differ in the group."""
        parts_NF, _ = self._parts(outcomes)
        differs = [informative_groups(part_N, outcomes.group_id_N) for part_N in parts_NF.nan_to_num(0.0).unbind(1)]
        return torch.stack(differs).any(0)

    def outcome_advantages(self, outcomes: Outcomes) -> Tensor:
        """Returns the advantages from the values of each reward function and the overlong penalty, fp64 [N]."""
        parts_NF, weights_F = self._parts(outcomes)
        if self.config.overlong.buffer_length > 0:
            parts_NF = torch.cat([parts_NF, self.penalty(outcomes)[:, None]], 1)
            weights_F = torch.cat([weights_F, torch.ones(1, dtype=torch.float64)])
        return decoupled(
            parts_NF,
            weights_F,
            outcomes.group_id_N,
            std=required(self.config.advantage_std, "algorithm.advantage_std"),
            eps=self.config.advantage_eps or 0.0,
            singleton=self.singleton,
        )

    @staticmethod
    def _parts(outcomes: Outcomes) -> tuple[Tensor, Tensor]:
        """Returns values and weights of the functions with a weight; the total with weight 1 if there are none."""
        weights = {name: weight for name, weight in outcomes.part_weights.items() if weight != 0}
        if not weights:
            return outcomes.rewards_N.double()[:, None], torch.ones(1, dtype=torch.float64)
        parts_NF = torch.stack([outcomes.parts[name].double() for name in weights], 1)
        return parts_NF, torch.tensor(list(weights.values()), dtype=torch.float64)


ALGORITHM = Gdpo
