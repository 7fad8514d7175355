"""Estimators of KL(pi || pi_ref) at the sampled tokens: k1, k2, k3, and their straight-through forms."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from mrl.algorithms.functional.importance import log_ratio

Estimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]

MAX_K3 = 10.0
"""Clamp of k3 (as in verl), which grows like exp(log pi_ref - log pi). Beyond it the gradient is zero."""


def kl_penalty(logprobs_R: Tensor, ref_logprobs_R: Tensor, estimator: Estimator) -> Tensor:
    """Returns the per-token estimate of KL(pi || pi_ref), nats; fp32, or fp64 for fp64 inputs.

    With d = log(pi / pi_ref), clamped to +-20 (`importance.MAX_LOG_RATIO`):

    - k1 = d. Unbiased as a value, may be negative. In a loss its gradient has expectation zero: use it in the reward.
    - k2 = d^2 / 2. Biased as a value, >= 0. On-policy its gradient in a loss is that of KL(pi || pi_ref).
    - k3 = exp(-d) - 1 + d, clamped to MAX_K3. Unbiased as a value, >= 0, low variance. Its gradient in a loss is (1 -
      exp(-d)) grad log pi, which on-policy is that of KL(pi_ref || pi).
    - abs = |d|. Not an estimate of the KL; verl has it.
    - k1+, k3+: the value of k1 or k3 with the gradient of k2, so that value and gradient are both those of KL(pi ||
      pi_ref).

    Args:
        logprobs_R: Log-probabilities of the current (loss) or sampling (reward) policy, nats, with gradient.
        ref_logprobs_R: Log-probabilities of the frozen reference, nats; constants.
        estimator: Name of the estimator.

    Raises:
        ValueError: The estimator is unknown, or the shapes differ.

    Source: J. Schulman, http://joschu.net/blog/kl-approx.html; `+`: verl's `kl_penalty`.
    """
    d_R = log_ratio(logprobs_R, ref_logprobs_R)
    if estimator in ("k1+", "k3+"):
        value_R = kl_penalty(logprobs_R, ref_logprobs_R, "k1" if estimator == "k1+" else "k3").detach()
        gradient_R = 0.5 * d_R.square()
        return value_R + (gradient_R - gradient_R.detach())
    if estimator == "abs":
        return d_R.abs()
    if estimator == "k1":
        return d_R
    if estimator == "k2":
        return 0.5 * d_R.square()
    if estimator == "k3":
        return ((-d_R).expm1() + d_R).clamp(max=MAX_K3)
    raise ValueError(f"KL estimator '{estimator}' is unknown, expected {', '.join(get_args(Estimator))}.")
