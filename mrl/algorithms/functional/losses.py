"""Policy losses whose ratio is a token's own: the clipped surrogate, CISPO, SAPO, DPPO, GPG, DRO.

None of them reduces: `aggregation` makes the weights that turn per-token losses into one number. What they share is in
`Surrogate`; those that look at a sequence as a whole are in `sequence_losses`.

Every function takes, for each response token, `logprobs_R` of the current policy (nats, with gradient),
`old_logprobs_R` of the policy that the ratio r = pi / pi_old is taken against (nats, a constant), and `advantages_R`
(constants); fp32, or fp64 for a result in fp64. Each raises ValueError where the shapes differ.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mrl.algorithms.functional.importance import at_least_fp32, log_ratio

CERTAIN = 1e-8
"""Added to the probability of all other tokens (as verl does): a certain token has a finite divergence."""


class Surrogate(NamedTuple):
    """What a policy loss gives for each token; only `loss_R` carries a gradient.

    Attributes:
        loss_R: Loss, unreduced.
        log_ratio_R: log(pi / pi_old), clamped to +-20.
        ratio_R: The ratio that the loss works with: the token's, or its sequence's.
        clipped_R: 1 where the loss bounds the ratio, or drops the token, else 0.
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
    """PPO's clipped surrogate, per token: max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_old.

    With `dual_clip` = c the loss of a token with A < 0 is at most -c A, so that a token whose ratio exploded does not
    dominate the step.

    Args:
        logprobs_R: Current policy.
        old_logprobs_R: Denominator of the ratio.
        advantages_R: Of each token.
        clip_low: The ratio is kept >= 1 - clip_low; in (0, 1].
        clip_high: The ratio is kept <= 1 + clip_high; above 0.
        dual_clip: c, above 1; 0: off.

    Raises:
        ValueError: The shapes differ.

    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; asymmetric bounds: DAPO (arXiv 2503.14476), eq. 10;
    dual clip: Ye et al. 2019 (arXiv 1912.09729), eq. 5.
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
    """`clipped_surrogate` of any ratio, each token's own or its sequence's."""
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
    """CISPO: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi; every token keeps its gradient.

    The ratio is a bounded weight of the policy gradient, whatever the sign of A.

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
    """SAPO: -(4 / tau) sigmoid(tau (r - 1)) A, a gate that is soft instead of a clip.

    At r = 1 the gradient is the policy gradient; it fades away from there, the faster the larger tau is.

    Args:
        logprobs_R: Current policy.
        old_logprobs_R: Denominator of the ratio.
        advantages_R: Of each token.
        tau_pos: Where A > 0.
        tau_neg: Elsewhere; larger than `tau_pos` in the paper, as these gradients spread over the whole vocabulary.

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
    """DPPO: -sg(min(r, ratio_cap)) A log pi, without the tokens whose probability has moved too far in A's direction.

    With p = pi and q = pi_old of the sampled token, far is
    - tv: p - q > clip_high where A > 0, p - q < -clip_low elsewhere;
    - kl: q log(q / p) + (1 - q) log((1 - q) / (1 - p)) > clip_high where A > 0 and p > q, > clip_low where A <= 0 and
      p < q.

    Args:
        logprobs_R: Current policy.
        old_logprobs_R: Denominator of the ratio.
        advantages_R: Of each token.
        divergence: Which of the two, each between the two-way distributions "this token, or another".
        clip_low: Bound of the divergence where A <= 0.
        clip_high: Bound of the divergence where A > 0.
        ratio_cap: Bound of the ratio as a weight.

    Source: arXiv 2602.04879. verl's `dppo_tv` and `dppo_kl` have the same, with `clip_ratio_c` (3 by
    default there, 20 in the paper) as the cap.
    """
    log_ratio_R = token_log_ratio(logprobs_R, old_logprobs_R, advantages_R).detach()
    ratio_R, advantages_R = log_ratio_R.exp(), at_least_fp32(advantages_R)
    new_R, old_R = at_least_fp32(logprobs_R.detach()), at_least_fp32(old_logprobs_R.detach())
    p_R, q_R = new_R.exp(), old_R.exp()
    if divergence == "tv":
        far_R = torch.where(advantages_R > 0, p_R - q_R > clip_high, p_R - q_R < -clip_low)
    else:
        others_R = (1.0 - q_R) * torch.log((1.0 - q_R + CERTAIN) / (1.0 - p_R + CERTAIN))
        kl_R = q_R * (old_R - new_R) + others_R
        far_R = torch.where(advantages_R > 0, (kl_R > clip_high) & (p_R > q_R), (kl_R > clip_low) & (p_R < q_R))
    weight_R = torch.where(far_R, 0.0, ratio_R.clamp(max=ratio_cap))
    loss_R = -weight_R * advantages_R * at_least_fp32(logprobs_R)
    capped_R = ~far_R & (ratio_R > ratio_cap)
    return Surrogate(loss_R, log_ratio_R, ratio_R, far_R.to(ratio_R.dtype), capped_R.to(ratio_R.dtype))


def gpg(logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor) -> Surrogate:
    """GPG: -A log pi, REINFORCE without ratio; the ratio is reported only.

    Source: arXiv 2504.02546; verl's `gpg`.
    """
    log_ratio_R = token_log_ratio(logprobs_R, old_logprobs_R, advantages_R)
    loss_R = -at_least_fp32(advantages_R) * at_least_fp32(logprobs_R)
    return _unclipped(loss_R, log_ratio_R, log_ratio_R.exp())


def dro(logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor, *, dro_beta: float) -> Surrogate:
    """DRO: -A log pi + (beta / 2) (log r)^2; a squared distance in place of a clip.

    The ratio is reported only. The squared log ratio has no gradient where |log r| > 20.

    Args:
        logprobs_R: Current policy.
        old_logprobs_R: Denominator of the ratio.
        advantages_R: Of each token.
        dro_beta: beta, above 0; where A is all that is known of a token, its best log ratio is A / beta.

    Source: arXiv 2405.19107, whose learned value of the prompt is the algorithm's baseline here; verl's `dro`.
    """
    log_ratio_R = token_log_ratio(logprobs_R, old_logprobs_R, advantages_R)
    loss_R = -at_least_fp32(advantages_R) * at_least_fp32(logprobs_R) + 0.5 * dro_beta * log_ratio_R.square()
    return _unclipped(loss_R, log_ratio_R, log_ratio_R.detach().exp())


def token_log_ratio(logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor) -> Tensor:
    """`importance.log_ratio`, where there is an advantage for each token."""
    if advantages_R.shape != logprobs_R.shape:
        raise ValueError(
            f"advantages have shape {tuple(advantages_R.shape)}, log-probabilities {tuple(logprobs_R.shape)}: "
            "both must have one entry for each response token."
        )
    return log_ratio(logprobs_R, old_logprobs_R)


def _unclipped(loss_R: Tensor, log_ratio_R: Tensor, ratio_R: Tensor) -> Surrogate:
    none_R = torch.zeros_like(ratio_R.detach())
    return Surrogate(loss_R, log_ratio_R.detach(), ratio_R.detach(), none_R, none_R)
