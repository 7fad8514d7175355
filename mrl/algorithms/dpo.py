"""DPO: learns from pairs of responses which one is preferred, with a penalty for leaving a reference.

Nothing is sampled: `rollout_logprobs_R` is ignored. The two responses of a pair are sequences of one microbatch.
Source: Rafailov et al. 2023 (arXiv 2305.18290); the other losses are in `algorithms/functional/preferences.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from mrl.algorithms.base import Algorithm, Outcomes, SumReduce, required
from mrl.algorithms.functional.preferences import Pairs, pair_losses
from mrl.algorithms.functional.sequence_losses import Sequences
from mrl.algorithms.sft import Sft
from mrl.config.config import LearnsFrom
from mrl.types import RolloutBatch


class Dpo(Algorithm):
    """Loss: mean over pairs of a function of log(pi / pi_ref), plus the weighted NLL of the preferred responses."""

    learns_from: ClassVar[LearnsFrom] = "pairs"
    defaults: ClassVar[dict[str, Any]] = {}
    kl_places = frozenset({"none"})
    unused = Sft.unused | {"loss_aggregation", "loss_norm_length", "kl_coef", "kl_estimator", "kl_unbiased", "kl_ctrl"}

    @property
    def needs_reference(self) -> bool:
        """Always true: every loss is a function of log(pi / pi_ref)."""
        return True

    def shape_rewards(self, outcomes: Outcomes) -> Tensor:
        """Returns the rewards unchanged; they are not used."""
        return outcomes.rewards_N.double()

    def outcome_advantages(self, outcomes: Outcomes) -> Tensor:
        """Returns 0 for each sample; they are not used."""
        return torch.zeros_like(outcomes.rewards_N, dtype=torch.float64)

    def advantages(self, batch: RolloutBatch, outcome_advantages_B: Tensor, reduce: SumReduce) -> None:
        """Sets 0 at every token; no collective is needed."""
        batch.advantages_R = torch.zeros_like(batch.rollout_logprobs_R)

    def weigh(self, minibatch: RolloutBatch, reduce: SumReduce) -> None:
        """Collective over data-parallel: sets each trained token's weight to that of its pair, 1 / pairs.

        The weight is not divided by the response's length: `loss` applies it once per pair.
        """
        mask_R, preferred_B = minibatch.response_mask_R, required(minibatch.sample_index_B, "sample_index_B") == 0
        preferred_R = mask_R & preferred_B[minibatch.sequence_R]
        pairs, preferred, trained = reduce(torch.stack([preferred_B.sum(), preferred_R.sum(), mask_R.sum()])).tolist()
        minibatch.weights_R = mask_R.float() / max(pairs, 1)
        minibatch.nll_weights_R = preferred_R * (self.config.dpo.sft_loss_weight / max(preferred, 1))
        minibatch.metric_weights_R = mask_R.float() / max(trained, 1)

    def loss(self, logprobs_R: Tensor, entropy_R: Tensor, microbatch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss sum of a microbatch's pairs, and metrics.

        Metrics are means over pairs; actor/entropy over the trained tokens.
        """
        settings, mask_R = self.config.dpo, microbatch.response_mask_R
        sequences = Sequences(mask_R, microbatch.sequence_R, microbatch.num_sequences)
        preferred, other = pair_rows(microbatch)
        logprobs_B = sequences.sums_B(logprobs_R.float())
        ratios_B = logprobs_B - sequences.sums_B(required(microbatch.ref_logprobs_R, "ref_logprobs_R"))
        lens_B = sequences.lens_B.clamp(min=1)
        pairs = Pairs(ratios_B[preferred], ratios_B[other], lens_B[preferred], lens_B[other])
        weight = sequences.largest_B(required(microbatch.weights_R, "weights_R"))[preferred]
        losses = pair_losses(pairs, settings.loss_type, settings.beta, settings.label_smoothing)
        nll_R = torch.where(mask_R, -logprobs_R.float(), 0.0)
        loss = (weight * losses).sum() + (required(microbatch.nll_weights_R, "nll_weights_R") * nll_R).sum()
        chosen, rejected = settings.beta * pairs.chosen.detach(), settings.beta * pairs.rejected.detach()
        pair_metrics = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": chosen > rejected,
            "logps/chosen": logprobs_B.detach()[preferred],
            "logps/rejected": logprobs_B.detach()[other],
        }
        metric_weights_R = required(microbatch.metric_weights_R, "metric_weights_R").double()
        entropy_R = torch.where(mask_R, entropy_R.detach().double(), 0.0)
        return loss, {
            "actor/loss": loss.detach().double(),
            "actor/entropy": (metric_weights_R * entropy_R).sum(),
            **{name: (weight.double() * value.double()).sum() for name, value in pair_metrics.items()},
        }


def pair_rows(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Returns the rows of the preferred and of the other sequence of each pair, [pairs] each."""
    index_B = required(batch.sample_index_B, "sample_index_B")
    order = torch.argsort(2 * batch.group_id_B + index_B)
    preferred, other = order[0::2], order[1::2]
    groups, places = batch.group_id_B, index_B.sum() * 2 == index_B.numel()
    if preferred.numel() != other.numel() or not places or not torch.equal(groups[preferred], groups[other]):
        raise RuntimeError("a microbatch has one sequence of a pair without the other")
    return preferred, other


ALGORITHM = Dpo
