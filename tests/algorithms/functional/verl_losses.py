"""What verl 0.9.1's own code gives for its policy losses and KL penalties: writes `verl_losses.json`.

    pip install --no-deps verl==0.9.1     # and what its imports ask for; torch on a CPU is enough
    python -m tests.algorithms.functional.verl_losses > tests/algorithms/functional/verl_losses.json

Data and settings are here too, so that tests need no verl. Two batches of three padded rows, fp64: in the first the
policies are near each other, in the second bounds bind and a token in the middle of a response is not trained.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

LENS = (5, 3, 4)
SPREADS = {"near": 0.4, "far": 0.9}


class Rows(NamedTuple):
    """Padded [3, 5], fp64."""

    old: Tensor
    new: Tensor
    advantages: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Entry:
    """verl's name of a loss, its aggregation, and settings of `ActorConfig` and `PolicyLossConfig`."""

    mode: str
    aggregation: str = "token-mean"
    actor: dict[str, float] = field(default_factory=dict)
    policy_loss: dict[str, float] = field(default_factory=dict)


def clips(low: float, high: float) -> dict[str, float]:
    """verl's clip range."""
    return {"clip_ratio_low": low, "clip_ratio_high": high}


ENTRIES = {
    "vanilla .2/.2 token-mean": Entry("vanilla"),
    "vanilla .2/.28": Entry("vanilla", actor=clips(0.2, 0.28)),
    "vanilla dual clip 1.2": Entry("vanilla", actor={"clip_ratio_c": 1.2}),
    "vanilla seq-mean-token-sum": Entry("vanilla", "seq-mean-token-sum"),
    "vanilla seq-mean-token-mean": Entry("vanilla", "seq-mean-token-mean"),
    "vanilla seq-mean-token-sum-norm": Entry("vanilla", "seq-mean-token-sum-norm"),
    "vanilla token-sum": Entry("vanilla", "token-sum"),
    "gspo 3e-4/4e-4": Entry("gspo", actor=clips(3e-4, 4e-4)),
    "gspo .2/.2": Entry("gspo"),
    "gspo seq-mean-token-mean": Entry("gspo", "seq-mean-token-mean", clips(3e-4, 4e-4)),
    "gspo seq-mean-token-sum": Entry("gspo", "seq-mean-token-sum", clips(3e-4, 4e-4)),
    "cispo .2/.2": Entry("cispo"),
    "cispo 1.0/5.0": Entry("cispo", actor=clips(1.0, 5.0)),
    "sapo 1/1.05": Entry("sapo"),
    "sapo .5/2": Entry("sapo", actor={"tau_pos": 0.5, "tau_neg": 2.0}),
    "geo_mean .4/.4": Entry("geo_mean", actor=clips(0.4, 0.4)),
    "geo_mean .2/.3": Entry("geo_mean", actor=clips(0.2, 0.3)),
    "dppo_tv .05": Entry("dppo_tv", actor=clips(0.05, 0.05)),
    "dppo_tv .1/.02 cap 1.3": Entry("dppo_tv", actor={**clips(0.1, 0.02), "clip_ratio_c": 1.3}),
    "dppo_kl .01": Entry("dppo_kl", actor=clips(0.01, 0.01)),
    "dppo_kl .05/.002 cap 1.3": Entry("dppo_kl", actor={**clips(0.05, 0.002), "clip_ratio_c": 1.3}),
    "gpg": Entry("gpg"),
    "kl_cov ratio .2 coef 1": Entry("kl_cov", policy_loss={"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0}),
    "kl_cov ratio .5 coef .1": Entry("kl_cov", policy_loss={"kl_cov_ratio": 0.5, "ppo_kl_coef": 0.1}),
    "dro .5": Entry("dro", policy_loss={"dro_beta": 0.5}),
    "dro 3 seq-mean-token-mean": Entry("dro", "seq-mean-token-mean", policy_loss={"dro_beta": 3.0}),
    # all that may be chosen: verl draws them with a generator of its own
    "clip_cov all": Entry("clip_cov", policy_loss={"clip_cov_ratio": 1.0, "clip_cov_lb": 0.0, "clip_cov_ub": 5.0}),
    "clip_cov .02 .1": Entry("clip_cov", policy_loss={"clip_cov_ratio": 1.0, "clip_cov_lb": 0.02, "clip_cov_ub": 0.1}),
}
KL = ("k1", "k2", "k3", "abs", "k1+", "k3+")


def rows(spread: str) -> Rows:
    """A batch by formula."""
    i, t = torch.arange(3, dtype=torch.float64)[:, None], torch.arange(5, dtype=torch.float64)[None]
    old = -(1.0 + 0.3 * torch.sin(1.0 + 2 * i + 3 * t))
    new = old + SPREADS[spread] * torch.cos(2.0 + 3 * i + t)
    mask = (t < torch.tensor(LENS, dtype=torch.float64)[:, None]).double()
    if spread == "far":
        mask[0, 2] = 0.0
    sign = -1.0 if spread == "far" else 1.0
    advantages = sign * torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)[:, None].expand(3, 5)
    return Rows(old, new, advantages, mask)


def of_verl() -> dict[str, dict[str, Any]]:
    """By batch and entry: loss, gradient of every position, metrics."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    found: dict[str, dict[str, Any]] = {}
    for spread in SPREADS:
        old, new, advantages, mask = rows(spread)
        of_spread: dict[str, Any] = found.setdefault(spread, {})
        for name, entry in ENTRIES.items():
            config = ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **entry.actor)
            object.__setattr__(config, "policy_loss", PolicyLossConfig(**entry.policy_loss))
            of_batch = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, "loss_scale_factor": None}
            object.__setattr__(config, "global_batch_info", of_batch)
            logprobs = new.clone().requires_grad_()
            loss, metrics = core_algos.get_policy_loss_fn(entry.mode)(
                old_log_prob=old,
                log_prob=logprobs,
                advantages=advantages.clone(),
                response_mask=mask,
                loss_agg_mode=entry.aggregation,
                config=config,
            )
            loss.backward()
            of_spread[name] = {"loss": loss.item(), "grad": (logprobs.grad * mask).tolist(), "metrics": metrics}
        for kind in KL:
            logprobs = new.clone().requires_grad_()
            value = (core_algos.kl_penalty(logprobs, old, kind) * mask).sum() / mask.sum()
            value.backward()
            of_spread[f"kl {kind}"] = {"loss": value.item(), "grad": logprobs.grad.tolist()}
    return found


if __name__ == "__main__":
    lines = [
        f"{json.dumps(spread)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
        + "\n}"
        for spread, entries in of_verl().items()
    ]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")
