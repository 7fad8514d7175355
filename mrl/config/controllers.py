"""How coefficients move in a run: `algorithm.kl_ctrl` and `algorithm.entropy_ctrl`, a part of the config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KlCtrlConfig:
    """The coefficient of a KL in the reward (verl's `kl_ctrl`)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: `kl_coef` is where it begins; after each step it moves towards `target_kl`."""
    target_kl: float = 0.1
    """Mean over the responses of their mean KL per token, nats, above 0."""
    horizon: int = 10000
    """Responses in which the coefficient changes by a fifth at most."""


@dataclass(frozen=True)
class EntropyCtrlConfig:
    """The coefficient of the entropy bonus (TRL's `use_adaptive_entropy`)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: `entropy_coef` is where it begins; it moves after each optimizer step, and there is no bonus while the
    entropy is above its target."""
    target_entropy: float = 0.2
    """Mean over the trained tokens, nats, above 0."""
    delta: float = 0.005
    """What an optimizer step adds or takes away, above 0."""
    min_coef: float = 0.0
    """Lower bound of the coefficient."""
    max_coef: float = 1.0
    """Upper bound, not below the lower one."""
