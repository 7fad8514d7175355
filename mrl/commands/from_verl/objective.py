"""Translates the advantages and the policy loss of a verl run: `algorithm.adv_estimator` and `actor.policy_loss`.

`config/verl_keys/loss_names.py` maps the names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrl.commands.from_verl.verl_run import VerlRun
from mrl.config.verl_keys.loss_names import ABSENT_ESTIMATORS, VERL_ESTIMATORS, VERL_LOSSES
from mrl.config.verl_keys.translated_keys import ACTOR, CORRECTION, ROLLOUT
from mrl.errors import UserError

DEFAULT_CLIP = 0.2
BY_SEQUENCE = ("sapo", "gmpo")
"""Losses that verl averages over sequences, regardless of `loss_agg_mode`."""
UNCLIPPED = ("sapo", "gpg", "kl_cov", "dro")
"""Losses without a clip range."""
OF_LOSS = {
    "sapo": ("tau_pos", "tau_neg"),
    "clip_cov": tuple(f"policy_loss.clip_cov_{name}" for name in ("ratio", "lb", "ub")),
    "kl_cov": ("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"),
    "dro": ("policy_loss.dro_beta",),
}
"""Loss -> its own settings, keys below the actor; mrl has the same names."""


def objective(verl: VerlRun) -> Iterator[tuple[str, Any]]:
    """Yields fields of `algorithm` and their values.

    Raises:
        UserError: mrl does not have the advantage estimator.
    """
    estimator = str(verl["algorithm.adv_estimator"])
    if estimator not in VERL_ESTIMATORS:
        why = ABSENT_ESTIMATORS.get(estimator, "write your own, algorithm.name=path/to/file.py:Name")
        raise UserError(
            f"algorithm.adv_estimator={estimator} is not in mrl. Choose one of {', '.join(VERL_ESTIMATORS)}. "
            f"{estimator}: {why}."
        )
    name = VERL_ESTIMATORS[estimator]
    yield "algorithm.name", name
    if name == "gpg":
        verl.notes["algorithm.adv_estimator"] = (
            "advantages are multiplied by the number of samples / the number of those in groups whose rewards differ, "
            "as in the paper; verl divides by the number of samples whose reward is not 0"
        )
        verl.lossless.add("algorithm.adv_estimator")
    if name == "gdpo":
        verl.notes["algorithm.adv_estimator"] = (
            "each function of reward.functions with a weight is one reward; verl uses several keys that one function "
            "returns"
        )
    if name.startswith("reinforce_pp") and verl["algorithm.gamma"] != 1:
        verl.notes["algorithm.gamma"] = f"with {estimator} an outcome's reward counts fully at each token"
    if name in ("grpo", "gdpo", "grpo_passk") and not verl["algorithm.norm_adv_by_std_in_grpo"]:
        yield "algorithm.advantage_std", "none"
    if verl[f"{ROLLOUT}n"] == 1 and name in ("grpo", "rloo", "gpg", "gdpo", "opo"):
        yield "algorithm.singleton_group", "reward"
    yield from _policy_loss(verl, "gpg" if name == "gpg" else "vanilla")


def _policy_loss(verl: VerlRun, own: str) -> Iterator[tuple[str, Any]]:
    """Yields fields of the policy loss; `own` is the algorithm's default loss."""
    loss = verl.one_of(f"{ACTOR}policy_loss.loss_mode", VERL_LOSSES, "vanilla")
    yield "algorithm.policy_loss", None if loss == own else loss
    mode = "seq-mean-token-mean" if loss in BY_SEQUENCE else verl[f"{ACTOR}loss_agg_mode"]
    yield "algorithm.loss_aggregation", mode.replace("-", "_")
    if mode == "seq-mean-token-sum-norm":
        yield "algorithm.loss_norm_length", verl[f"{ACTOR}loss_scale_factor"]
    if verl.given.get(f"{CORRECTION}.bypass_mode") is True and verl.given.get(f"{CORRECTION}.loss_type") == "reinforce":
        return  # the loss is the policy gradient, which is not clipped
    for side in ("low", "high"):
        clip = verl[f"{ACTOR}clip_ratio_{side}"]
        clip = verl.given.get(f"{ACTOR}clip_ratio", DEFAULT_CLIP) if clip is None else clip
        clip = min(clip, 1.0) if (loss, side) == ("cispo", "low") else clip  # a ratio is never below 0
        default = clip == DEFAULT_CLIP and loss == "vanilla"
        yield f"algorithm.clip_{side}", None if default or loss in UNCLIPPED else clip
    if cap := {"vanilla": "dual_clip", "dppo_tv": "dppo.ratio_cap", "dppo_kl": "dppo.ratio_cap"}.get(loss):
        yield f"algorithm.{cap}", verl[f"{ACTOR}clip_ratio_c"]
    for setting in OF_LOSS.get(loss, ()):
        yield f"algorithm.{loss}.{setting.rpartition('.')[2]}", verl[f"{ACTOR}{setting}"]
