"""The section `algorithm.rollout_correction`, with verl's names, and how it acts.

Owns its fields, their defaults and what a preset fills in. What its texts mean is read by the algorithms.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, Optional

from mrl.config.verl_keys.verl_presets import PRESETS


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Correction of samples that another policy drew than the one that trains; names and meanings are verl's."""

    preset: Optional[str] = None
    """Name of one of verl's (`mrl/config/verl_keys/verl_presets.py`), which sets the fields below; of these only
    thresholds may be set beside it. null: none; but decoupled_token_is where `train.mode=async` samples ahead of the
    updates and no field of the section is set."""
    bypass_mode: Optional[bool] = None
    """Denominator of the clipped ratio: true: the log-probabilities captured while sampling; false ("decoupled"): the
    actor's own at the rollout weights, from the update or a pass before it. null: true, or the preset's."""
    loss_type: Optional[Literal["ppo_clip", "reinforce"]] = None
    """With `bypass_mode`: ppo_clip: the algorithm's loss, whose ratio is the weight; reinforce: -w A log pi with the
    weight w of `rollout_is`. null: ppo_clip, or the preset's."""
    rollout_is: Optional[Literal["token", "sequence"]] = None
    """Multiply the loss by exp(l) of each token, or of the sum of l over the response; l is the actor's minus the
    sampler's log-probability, the actor's at the rollout weights, in bypass mode as it is. null: no weights."""
    rollout_is_threshold: Optional[str] = None
    """2.0: weights above are cut to it; 0.5_5.0 (IcePop): weights outside are 0. null: 2.0, or the preset's."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean: over the step's batch, in bypass mode over the minibatch."""
    rollout_rs: Optional[str] = None
    """Train only where all of a comma list hold: token_, seq_sum_, seq_mean_ (geometric) or seq_max_ with k1 (-l), k2
    (l^2/2) or k3 (e^l - 1 - l); or binary_kl (KPop), the larger KL of the sampled token against all others."""
    rollout_rs_threshold: Optional[str] = None
    """Bound of each, comma separated, or one for all. k1: 0.5_2.0 bounds e^-l, one number f means 1/f to f; others: the
    largest that is kept. null: the preset's."""
    rollout_rs_denominator: Literal["all", "kept"] = "all"
    """Tokens that the loss and the metrics are a mean over: with those that `rollout_rs` rejects, so that what is kept
    weighs the same however much is rejected; or without."""
    off_policy_mask_threshold: Optional[float] = None
    """OPSM (arXiv 2512.02556): no policy loss for a response with a negative advantage where the mean of the sampler's
    minus the actor's log-probability is above this; null: off."""

    @property
    def takes_sampled(self) -> bool:
        """Whether the log-probabilities captured while sampling enter the loss."""
        acting = self.acting
        corrects = acting.rollout_is or acting.rollout_rs or acting.off_policy_mask_threshold is not None
        return bool(acting.bypass_mode or corrects)

    @property
    def acting(self) -> RolloutCorrectionConfig:
        """With the preset's fields, and what is left open, filled in; a name that is no preset counts as null."""
        given: dict[str, Any] = {
            item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None
        }
        filled: dict[str, Any] = (
            {"bypass_mode": True, "loss_type": "ppo_clip"} | PRESETS.get(self.preset or "", {}) | given
        )
        if filled.get("rollout_is"):
            filled = {"rollout_is_threshold": "2.0"} | filled
        return RolloutCorrectionConfig(**filled)
