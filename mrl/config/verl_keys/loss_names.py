"""Names of policy losses and advantages in verl and TRL."""

from __future__ import annotations

VERL_LOSSES = {
    "vanilla": "vanilla",
    "gspo": "gspo",
    "cispo": "cispo",
    "sapo": "sapo",
    "geo_mean": "gmpo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "gpg": "gpg",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "dro": "dro",
}
"""`actor.policy_loss.loss_mode` of verl 0.9.1 -> `algorithm.policy_loss`."""

VERL_ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "gpg": "gpg",
    "gdpo": "gdpo",
    "opo": "opo",
    "grpo_passk": "grpo_passk",
}
"""`algorithm.adv_estimator` of verl 0.9.1 -> `algorithm.name`."""

_OTB = "its baseline of each token weighs rewards by norms of gradients; algorithm.name=rloo has one per response"

ABSENT_ESTIMATORS = {
    "remax": "its baseline is the reward of one more, greedy response to each prompt, which mrl does not sample; "
    "algorithm.name=rloo has the mean of the other responses",
    "optimal_token_baseline": _OTB,
    "tir_optimal_token_baseline": _OTB,
}
"""`algorithm.adv_estimator` of verl that mrl does not have -> how it differs, and the nearest that mrl has."""

TRL_LOSSES = {
    "vanilla": "loss_type grpo, bnpo, dapo or dr_grpo",
    "gspo": "loss_type=grpo importance_sampling_level=sequence",
    "luspo": "loss_type=luspo importance_sampling_level=sequence",
    "cispo": "loss_type=cispo",
    "sapo": "loss_type=sapo",
    "vespo": "loss_type=vespo",
}
"""`algorithm.policy_loss` -> fields of TRL 1.16's GRPOConfig."""

VALUES = {
    ("algorithm.policy_loss", "gspo_token"): "is gspo: its token form is the one that mrl has",
    ("algorithm.policy_loss", "ppo"): "is vanilla",
    ("algorithm.policy_loss", "ppo_clip"): "is vanilla",
    ("algorithm.policy_loss", "grpo"): "is vanilla, with algorithm.name=grpo",
    ("algorithm.policy_loss", "dapo"): "is vanilla, with algorithm.name=dapo",
    ("algorithm.policy_loss", "dr_grpo"): "is vanilla, with algorithm.name=dr_grpo",
    ("algorithm.policy_loss", "bnpo"): "is vanilla, with algorithm.loss_aggregation=token_mean",
    ("algorithm.policy_loss", "dppo"): "is dppo_tv or dppo_kl",
    **{("algorithm.policy_loss", theirs): f"is verl's name for {own}"
       for theirs, own in VERL_LOSSES.items() if theirs != own},
}  # fmt: skip
"""(key, other name of a value) -> its meaning in mrl."""
