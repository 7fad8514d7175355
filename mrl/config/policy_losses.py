"""Sections below `algorithm` of one policy loss each, by the loss's name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SapoConfig:
    """Of `algorithm.policy_loss=sapo` (verl's names)."""

    tau_pos: float = 1.0
    """How fast the gate closes where the advantage is above 0."""
    tau_neg: float = 1.05
    """How fast it closes elsewhere."""


@dataclass(frozen=True)
class VespoConfig:
    """Of `algorithm.policy_loss=vespo` (TRL's `vespo_*`): the kernel w^k exp(lambda (1 - w))."""

    k_pos: float = 2.0
    """k where the advantage is at least 0."""
    lambda_pos: float = 3.0
    """lambda where the advantage is at least 0."""
    k_neg: float = 3.0
    """k where the advantage is below 0."""
    lambda_neg: float = 2.0
    """lambda where the advantage is below 0."""


@dataclass(frozen=True)
class DppoConfig:
    """Of `algorithm.policy_loss=dppo_tv` and `dppo_kl`, which bound the divergence by `clip_low` and `clip_high`."""

    ratio_cap: float = 20.0
    """Bound of the ratio as a weight (verl's `clip_ratio_c`)."""


@dataclass(frozen=True)
class ClipCovConfig:
    """Of `algorithm.policy_loss=clip_cov` (verl's names): which tokens are dropped."""

    clip_cov_ratio: float = 2e-4
    """Part of the minibatch's trained tokens, at least one, drawn where the covariance is between the bounds."""
    clip_cov_lb: float = 1.0
    """Lower bound of the covariance with the advantage."""
    clip_cov_ub: float = 5.0
    """Upper bound, above the lower one."""


@dataclass(frozen=True)
class KlCovConfig:
    """Of `algorithm.policy_loss=kl_cov` (verl's names): which tokens are held back, and how much."""

    kl_cov_ratio: float = 2e-4
    """Part of the minibatch's trained tokens, at least one, with the largest covariance with the advantage."""
    ppo_kl_coef: float = 0.1
    """Factor of |log ratio| at these."""


@dataclass(frozen=True)
class DroConfig:
    """Of `algorithm.policy_loss=dro` (verl's name)."""

    dro_beta: float = 1.0
    """Factor of half the squared log ratio, which holds the policy near the one that sampled; verl has no default."""
