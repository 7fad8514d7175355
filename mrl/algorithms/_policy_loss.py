"""The policy losses that `algorithm.policy_loss` names: each one's function, its defaults and the fields that it reads.

Owns which loss reads which field of the config. Any of them goes with the advantages of any algorithm; an algorithm's
own table says which one it has by default. What they compute is in `functional/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from mrl.config import AlgorithmConfig
from mrl.functional import losses, sequence_losses
from mrl.functional.losses import Surrogate
from mrl.functional.sequence_losses import Sequences


class Tokens(NamedTuple):
    """What a policy loss sees of a microbatch, one entry for each response token; see `functional/losses.py`."""

    logprobs_R: Tensor
    old_logprobs_R: Tensor
    advantages_R: Tensor


Settings = Mapping[str, float]
"""The numbers that a loss reads, by the last part of their keys."""


@dataclass(frozen=True)
class PolicyLoss:
    """One policy loss.

    Attributes:
        function: Of `functional/losses.py` or `functional/sequence_losses.py`.
        reads: Keys below `algorithm` that it reads; the function's arguments are their last parts.
        defaults: Fields that are null in the config and that another loss than the algorithm's own brings with it.
        fixed: Arguments that are no setting.
    """

    function: Callable[..., Surrogate]
    reads: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, tokens: Tokens, sequences: Sequences, config: AlgorithmConfig) -> Surrogate:
        """The loss of each token."""
        settings = {key.rpartition(".")[2]: attrgetter(key)(config) for key in self.reads}
        arguments = (*tokens, sequences) if self.function.__module__ == sequence_losses.__name__ else tokens
        return self.function(*arguments, **settings, **self.fixed)


CLIPS = ("clip_low", "clip_high")
DPPO = (*CLIPS, "dppo.ratio_cap")
BY_SEQUENCE = {"loss_aggregation": "seq_mean_token_mean"}
GSPO = {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": 0.0}

LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss(
        losses.clipped_surrogate, (*CLIPS, "dual_clip"), {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}
    ),
    "gspo": PolicyLoss(sequence_losses.gspo, (*CLIPS, "dual_clip"), GSPO | BY_SEQUENCE),
    "luspo": PolicyLoss(sequence_losses.gspo, (*CLIPS, "dual_clip"), GSPO | {"loss_aggregation": "seq_mean_token_sum"}),
    "cispo": PolicyLoss(losses.cispo, CLIPS, {"clip_low": 1.0, "clip_high": 4.0}),
    "sapo": PolicyLoss(losses.sapo, ("sapo.tau_pos", "sapo.tau_neg"), BY_SEQUENCE),
    "gmpo": PolicyLoss(sequence_losses.gmpo, CLIPS, {"clip_low": 0.4, "clip_high": 0.4} | BY_SEQUENCE),
    "vespo": PolicyLoss(sequence_losses.vespo, ("vespo.k_pos", "vespo.lambda_pos", "vespo.k_neg", "vespo.lambda_neg")),
    "dppo_tv": PolicyLoss(losses.dppo, DPPO, {"clip_low": 0.15, "clip_high": 0.15}, {"divergence": "tv"}),
    "dppo_kl": PolicyLoss(losses.dppo, DPPO, {"clip_low": 0.05, "clip_high": 0.05}, {"divergence": "kl"}),
    "gpg": PolicyLoss(losses.gpg),
}

READ = frozenset(key for loss in LOSSES.values() for key in loss.reads)
"""Keys below `algorithm` that only policy losses read."""
