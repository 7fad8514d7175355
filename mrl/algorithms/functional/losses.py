"""Policy losses with a token-level ratio: clipped surrogate, CISPO, SAPO, DPPO, GPG, DRO.

None of them reduces: `aggregation` gives the weights of the per-token losses. Losses with a sequence-level ratio are in
`sequence_losses`.

Every function takes, for each response token, `logprobs_R` of the current policy (nats, with gradient),
`old_logprobs_R` of the policy in the denominator of the ratio r = pi / pi_old (nats, a constant), and `advantages_R`
(constants). Results are fp32, or fp64 for fp64 inputs. Each raises ValueError if the shapes differ.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mrl.algorithms.functional.importance import at_least_fp32, log_ratio

CERTAIN = 1e-8
"""Number added to the probability of all other tokens (as in verl), so that a token of probability 1 has a finite
divergence."""


class Surrogate(NamedTuple):
    """Policy loss of each token; only `loss_R` carries a gradient.

    Attributes:
        loss_R: Loss, unreduced.
        log_ratio_R: log(pi / pi_old), clamped to +-20.
        ratio_R: Ratio in the loss, of the token or of its sequence.
        clipped_R: 1 where the loss bounds the ratio or drops the token, else 0.
        clipped_lower_R: 1 where a second bound binds (dual clip, cap), else 0.
    """

    loss_R: Tensor
    log_ratio_R: Tensor
    ratio_R: Tensor
    clipped_R: Tensor
    clipped_lower_R: Tensor


def clipped_surrogate(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    advantages_R: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Surrogate:
    """Returns PPO's clipped surrogate per token: max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_old.

    With `dual_clip` = c the loss of a token with A < 0 is at most -c A, so that a token whose ratio exploded does not
    dominate the step.

    Args:
        logprobs_R: Log-probabilities of the current policy.
        old_logprobs_R: Log-probabilities in the ratio's denominator.
        advantages_R: Advantage of each token.
        clip_low: Lower clip range, in (0, 1]: the ratio is kept >= 1 - clip_low.
        clip_high: Upper clip range, above 0: the ratio is kept <= 1 + clip_high.
        dual_clip: Dual-clip bound c, above 1; 0: off.

    Raises:
        ValueError: The shapes differ.

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; asymmetric bounds: DAPO (arXiv 2503.14476), eq. 10; dual
    clip: Ye et al. 2019 (arXiv 1912.09729), eq. 5.
    """
    log_ratio_R = token_log_ratio(logprobs_R, old_logprobs_R, advantages_R)
    return bounded_surrogate(
        log_ratio_R, log_ratio_R.exp(), advantages_R, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )


def bounded_surrogate(
    log_ratio_R: Tensor,
    ratio_R: Tensor,
    advantages_R: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Surrogate:
    """Returns `clipped_surrogate` for any given ratio, token-level or sequence-level."""
    advantages_R = at_least_fp32(advantages_R)
    plain_R = -advantages_R * ratio_R
    bounded_R = -advantages_R * ratio_R.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_R = torch.maximum(plain_R, bounded_R)
    clipped_R = (bounded_R > plain_R).to(ratio_R.dtype)
    clipped_lower_R = torch.zeros_like(clipped_R)
    if dual_clip > 0:
        bound_R = -advantages_R * dual_clip
        binds_R = (advantages_R < 0) & (loss_R > bound_R)
        loss_R = torch.where(binds_R, bound_R, loss_R)
        clipped_lower_R = binds_R.to(ratio_R.dtype)
    return Surrogate(loss_R, log_ratio_R.detach(), ratio_R.detach(), clipped_R, clipped_lower_R)


def cispo(
    logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """Returns CISPO's loss: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi; every token keeps its gradient.

    The clipped ratio is a weight of the policy gradient, for either sign of A.

    Source: MiniMax-M1, arXiv 2506.13585, which sets no lower bound (`clip_low` = 1). verl bounds below by its
    `clip_ratio_low`; TRL has no lower bound, and its `epsilon_high` is the bound itself, 1 + clip_high.
    """
    log_ratio_R = token_log_ratio(logprobs_R, old_logprobs_R, advantages_R)
    ratio_R = log_ratio_R.detach().exp()
    weight_R = ratio_R.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_R = -weight_R * at_least_fp32(advantages_R) * at_least_fp32(logprobs_R)
    return _unclipped(loss_R, log_ratio_R, ratio_R)._replace(clipped_R=(weight_R != ratio_R).to(ratio_R.dtype))


def sapo(
    logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor, *, tau_pos: float, tau_neg: float
) -> Surrogate:
    """Returns SAPO's loss: -(4 / tau) sigmoid(tau (r - 1)) A, a soft gate instead of a clip.

    At r = 1 the gradient is the policy gradient; it decays away from there, faster for a larger tau.

    Args:
        logprobs_R: Log-probabilities of the current policy.
        old_logprobs_R: Log-probabilities in the ratio's denominator.
        advantages_R: Advantage of each token.
        tau_pos: Temperature tau for A > 0.
        tau_neg: Temperature tau for A <= 0; larger than `tau_pos` in the paper, as these gradients spread over the
            full vocabulary.

    Source: arXiv 2511.20347. verl and TRL have the same; verl always aggregates by seq-mean-token-mean.
    """
    log_ratio_R = token_log_ratio(logprobs_R, old_logprobs_R, advantages_R)
    ratio_R, advantages_R = log_ratio_R.exp(), at_least_fp32(advantages_R)
    tau_R = torch.where(advantages_R > 0, tau_pos, tau_neg).to(ratio_R.dtype)
    loss_R = -(4.0 / tau_R) * torch.sigmoid(tau_R * (ratio_R - 1.0)) * advantages_R
    return _unclipped(loss_R, log_ratio_R, ratio_R)


def dppo(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    advantages_R: Tensor,
    *,
    divergence: Literal["tv", "kl"],
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> Surrogate:
    """Returns DPPO's loss: -sg(min(r, ratio_cap)) A log pi, 0 at tokens outside the trust region.

    With p = pi and q = pi_old of the sampled token, a token is outside if
    - tv: p - q > clip_high where A > 0, p - q < -clip_low elsewhere;
    - kl: q log(q / p) + (1 - q) log((1 - q) / (1 - p)) > clip_high where A > 0 and p > q, > clip_low where A <= 0 and p
      < q.

    Args:
        logprobs_R: Log-probabilities of the current policy.
        old_logprobs_R: Log-probabilities in the ratio's denominator.
        advantages_R: Advantage of each token.
        divergence: Divergence between the binary distributions "this token, or another": total variation or KL.
        clip_low: Bound of the divergence where A <= 0.
        clip_high: Bound of the divergence where A > 0.
        ratio_cap: Upper bound of the ratio as a weight.

    Source: arXiv 2602.04879. verl's `dppo_tv` and `dppo_kl` have the same, with `clip_ratio_c` (3 by default there, 20
    in the paper) as the cap.
    """
    log_ratio_R = token_log_ratio(logprobs_R, old_logprobs_R, advantages_R).detach()
    ratio_R, advantages_R = log_ratio_R.exp(), at_least_fp32(advantages_R)
    new_R, old_R = at_least_fp32(logprobs_R.detach()), at_least_fp32(old_logprobs_R.detach())
    p_R, q_R = new_R.exp(), old_R.exp()
    if divergence == "tv":
        outside_R = torch.where(advantages_R > 0, p_R - q_R > clip_high, p_R - q_R < -clip_low)
    else:
        others_R = (1.0 - q_R) * torch.log((1.0 - q_R + CERTAIN) / (1.0 - p_R + CERTAIN))
        kl_R = q_R * (old_R - new_R) + others_R
        outside_R = torch.where(advantages_R > 0, (kl_R > clip_high) & (p_R > q_R), (kl_R > clip_low) & (p_R < q_R))
    weight_R = torch.where(outside_R, 0.0, ratio_R.clamp(max=ratio_cap))
    loss_R = -weight_R * advantages_R * at_least_fp32(logprobs_R)
    capped_R = ~outside_R & (ratio_R > ratio_cap)
    return Surrogate(loss_R, log_ratio_R, ratio_R, outside_R.to(ratio_R.dtype), capped_R.to(ratio_R.dtype))


def gpg(logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor) -> Surrogate:
    """Returns GPG's loss: -A log pi, REINFORCE without a ratio, which is only reported.

    Source: arXiv 2504.02546; verl's `gpg`.
    """
    log_ratio_R = token_log_ratio(logprobs_R, old_logprobs_R, advantages_R)
    loss_R = -at_least_fp32(advantages_R) * at_least_fp32(logprobs_R)
    return _unclipped(loss_R, log_ratio_R, log_ratio_R.exp())


def dro(logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor, *, dro_beta: float) -> Surrogate:
    """Returns DRO's loss: -A log pi + (beta / 2) (log r)^2, a squared distance instead of a clip.

    The ratio is only reported. The squared log-ratio has no gradient where |log r| > 20.

    Args:
        logprobs_R: Log-probabilities of the current policy.
        old_logprobs_R: Log-probabilities in the ratio's denominator.
        advantages_R: Advantage of each token.
        dro_beta: Coefficient beta, above 0. The optimal log-ratio of a token with advantage A is A / beta.

    Source: arXiv 2405.19107, whose learned value of the prompt is the algorithm's baseline here; verl's `dro`.
    """
    log_ratio_R = token_log_ratio(logprobs_R, old_logprobs_R, advantages_R)
    loss_R = -at_least_fp32(advantages_R) * at_least_fp32(logprobs_R) + 0.5 * dro_beta * log_ratio_R.square()
    return _unclipped(loss_R, log_ratio_R, log_ratio_R.detach().exp())


def token_log_ratio(logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor) -> Tensor:
    """Returns `importance.log_ratio`, after checking that each token has an advantage."""
    if advantages_R.shape != logprobs_R.shape:
        raise ValueError(
            f"advantages have shape {tuple(advantages_R.shape)}, log-probabilities {tuple(logprobs_R.shape)}: "
            "both must have one entry for each response token."
        )
    return log_ratio(logprobs_R, old_logprobs_R)


def _unclipped(loss_R: Tensor, log_ratio_R: Tensor, ratio_R: Tensor) -> Surrogate:
    zeros_R = torch.zeros_like(ratio_R.detach())
    return Surrogate(loss_R, log_ratio_R.detach(), ratio_R.detach(), zeros_R, zeros_R)
