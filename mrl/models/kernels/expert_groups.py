"""Selection of experts in groups, the same in the actor and the native engine."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.models.base import MoeSpec


def in_best_groups(scores_nE: Tensor, moe: MoeSpec) -> Tensor:
    """Returns the scores with -inf for the experts outside the token's best groups, see `MoeSpec.num_groups`."""
    if moe.num_groups == 1:
        return scores_nE
    grouped_nGM = scores_nE.view(-1, moe.num_groups, moe.num_experts // moe.num_groups)
    best_nG = grouped_nGM.topk(min(2, grouped_nGM.size(2)), -1).values.sum(-1)
    chosen_nG = torch.zeros_like(best_nG, dtype=torch.bool).scatter_(1, best_nG.topk(moe.top_groups, -1).indices, True)
    return grouped_nGM.masked_fill(~chosen_nG[:, :, None], -torch.inf).flatten(1)
