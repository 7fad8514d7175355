"""PPO with a critic: generalised advantage estimates, normalised over the global batch.

Source: arXiv 1707.06347; the estimates: arXiv 1506.02438. The reward is given at the last trained token (with
`credit=turn` at the last of each turn), minus the KL of each token if `kl_in` is "reward".
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from mrl.algorithms._policy_gradient import PolicyGradient
from mrl.algorithms.base import PROXIMAL, Outcomes, SumReduce, required
from mrl.algorithms.functional.advantages import StdKind, whiten
from mrl.algorithms.functional.gae import gae, length_adaptive_lam
from mrl.types import RolloutBatch


class Ppo(PolicyGradient):
    """Advantage (A - mean(A)) / sqrt(var(A) + eps) over the batch's tokens, with A from the critic's values."""

    baseline = "none"
    needs_values = True
    kl_places = frozenset({"none", "loss", "reward"})
    unused = frozenset({"singleton_group", "advantage_std_over"})
    defaults: ClassVar[dict[str, Any]] = {
        "gamma": 1.0,
        "lam": 1.0,
        "lam_length_alpha": 0.0,
        "advantage_std": "unbiased",
        "advantage_eps": 1e-8,
        "loss_aggregation": "token_mean",
        "policy_loss": "vanilla",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 0.0,
        "dynamic_sampling": False,
    }

    @property
    def reads_early(self) -> frozenset[str]:
        """Adds the proximal policy if the rollout correction rejects tokens, which the critic then skips."""
        return super().reads_early | ({PROXIMAL} if self.correction.spec.rejections else set())

    def outcome_advantages(self, outcomes: Outcomes) -> Tensor:
        """Returns the reward of each sample, or of each turn without later turns (GAE propagates those), fp64 [N]."""
        return super().outcome_advantages(outcomes) if outcomes.own_N is None else outcomes.own_N

    def advantages(self, batch: RolloutBatch, outcome_advantages_B: Tensor, reduce: SumReduce) -> None:
        """Collective over data-parallel: sets advantages and returns, from the rewards and `batch.values_R`.

        The returns are estimates plus values, before the normalisation. `overlong.mask_truncated` narrows the mask
        first. Tokens that a decoupled run's correction rejects are skipped like a tool's tokens, by the critic too.
        """
        config, mask_R = self.config, self._narrow_mask(batch, reduce)
        batch.critic_mask_R = self.correction.accepted_R(batch)
        valued_R, values_R = batch.valued_R, required(batch.values_R, "values_R")
        rewards_R = _rewards_at_last_token(valued_R, outcome_advantages_B, batch.advantage_index_R)
        if config.kl_in == "reward":
            rewards_R = rewards_R - self._kl_charge_R(batch, reduce)
        lens_B = torch.zeros(batch.num_sequences, dtype=torch.float64)
        lens_B.index_add_(0, batch.sequence_R, mask_R.double())
        if config.lam_length_alpha:
            lam_B = length_adaptive_lam(lens_B, config.lam_length_alpha)
        else:
            lam_B = torch.full_like(lens_B, required(config.lam, "algorithm.lam"))
        value_lam_B = lam_B if config.value_lam is None else torch.full_like(lens_B, config.value_lam)
        gamma = required(config.gamma, "algorithm.gamma")

        def estimates(lam_B: Tensor) -> Tensor:
            return gae(rewards_R, values_R, valued_R, batch.response_lens_B, gamma=gamma, lam_B=lam_B)

        advantages_R = estimates(lam_B)
        value_advantages_R = advantages_R if value_lam_B is lam_B else estimates(value_lam_B)
        batch.returns_R = torch.where(valued_R, value_advantages_R + values_R, 0.0).float()
        std: StdKind = required(config.advantage_std, "algorithm.advantage_std")
        eps = config.advantage_eps or 0.0
        counted_R = self.counted_R(batch) & valued_R
        whitened_R = whiten(advantages_R, counted_R, reduce, std=std, eps=eps, under_root=True)
        batch.advantages_R = torch.where(valued_R, whitened_R, 0.0).float()


def _rewards_at_last_token(mask_R: Tensor, rewards_B: Tensor, sequence_R: Tensor) -> Tensor:
    """Returns the reward of each sequence or turn at the last of its tokens in the mask, fp64 [R]; 0 elsewhere."""
    rewards_R = torch.zeros(mask_R.numel(), dtype=torch.float64)
    trained = mask_R.nonzero().squeeze(1)
    owners = sequence_R[trained]
    last = torch.ones_like(owners, dtype=torch.bool)
    last[:-1] = owners[1:] != owners[:-1]
    rewards_R[trained[last]] = rewards_B.double()[owners[last]]
    return rewards_R


ALGORITHM = Ppo
