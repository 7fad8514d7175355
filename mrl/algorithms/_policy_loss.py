"""The policy losses that `algorithm.policy_loss` names: function, defaults and config fields of each.

Each loss works with the advantages of any algorithm. The formulas are in `algorithms/functional/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from mrl.algorithms.functional import clip_cov, losses, sequence_losses
from mrl.algorithms.functional.losses import Surrogate
from mrl.algorithms.functional.sequence_losses import Sequences
from mrl.config.config import AlgorithmConfig


class Tokens(NamedTuple):
    """Inputs of a policy loss (`algorithms/functional/losses.py`), one entry per response token."""

    logprobs_R: Tensor
    old_logprobs_R: Tensor
    advantages_R: Tensor


Chooser = Callable[..., Tensor]
"""(logprobs_R, old_logprobs_R, advantages_R, mask_R, uniforms_R, reduce, settings by name) -> bool [R].

Collective over data-parallel: selects the tokens of the full minibatch that a loss treats separately. See
`algorithms/functional/clip_cov.py`."""


@dataclass(frozen=True)
class PolicyLoss:
    """Policy loss, with the config keys that it reads.

    Attributes:
        function: Formula, called with `logprobs_R`, `old_logprobs_R`, `advantages_R`, with the selection of
            `token_selection` if there is one, and with the values of `reads` and `fixed` as keywords; returns a
            `Surrogate`. Those of mrl are in `losses`, `sequence_losses` and `clip_cov` of `algorithms/functional/`;
            the second also get the sequences.
        reads: Config keys below `algorithm` that become arguments of `function`, named by their last part.
        defaults: Values for null config fields if this loss replaces the algorithm's own.
        fixed: Arguments of `function` that are not configurable.
        token_selection: Selects tokens that the loss treats separately; None: no selection.
        token_selection_reads: Config keys that become arguments of `token_selection`.
    """

    function: Callable[..., Surrogate]
    reads: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    token_selection: Chooser | None = None
    token_selection_reads: tuple[str, ...] = ()

    @property
    def keys(self) -> frozenset[str]:
        """All config keys that it reads, below `algorithm`."""
        return frozenset((*self.reads, *self.token_selection_reads))

    def __call__(
        self, tokens: Tokens, sequences: Sequences, config: AlgorithmConfig, chosen_R: Tensor | None = None
    ) -> Surrogate:
        """Computes the loss of each token; `chosen_R` is the result of `choose`, for losses with a token selection."""
        more: tuple[Any, ...] = () if chosen_R is None else (chosen_R,)
        if self.function.__module__ == sequence_losses.__name__:
            more = (sequences,)
        return self.function(*tokens, *more, **_settings(self.reads, config), **self.fixed)

    def choose(
        self,
        tokens: Tokens,
        mask_R: Tensor,
        uniforms_R: Tensor,
        reduce: Callable[[Tensor], Tensor],
        config: AlgorithmConfig,
    ) -> Tensor:
        """Collective over data-parallel: selects the tokens of the minibatch that the loss treats separately, bool [R].

        Args:
            tokens: Inputs of this rank, log-probabilities by the weights before the update.
            mask_R: True where the token is trained.
            uniforms_R: One random number per token, in [0, 1).
            reduce: Elementwise sum over the data-parallel ranks.
            config: Resolved config.
        """
        if self.token_selection is None:
            raise RuntimeError("choose was called for a policy loss without a token selection")
        return self.token_selection(
            *tokens, mask_R, uniforms_R, reduce, **_settings(self.token_selection_reads, config)
        )


def _settings(keys: tuple[str, ...], config: AlgorithmConfig) -> dict[str, float]:
    """Returns the values of the keys, by the last part of each key."""
    return {key.rpartition(".")[2]: attrgetter(key)(config) for key in keys}


CLIPS = ("clip_low", "clip_high")
DPPO = (*CLIPS, "dppo.ratio_cap")
BY_SEQUENCE = {"loss_aggregation": "seq_mean_token_mean"}
GSPO = {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": 0.0}

LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss(
        losses.clipped_surrogate, (*CLIPS, "dual_clip"), {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}
    ),
    "gspo": PolicyLoss(sequence_losses.gspo, (*CLIPS, "dual_clip"), GSPO | BY_SEQUENCE),
    "luspo": PolicyLoss(
        sequence_losses.luspo, (*CLIPS, "dual_clip"), GSPO | {"loss_aggregation": "seq_mean_token_sum"}
    ),
    "cispo": PolicyLoss(losses.cispo, CLIPS, {"clip_low": 1.0, "clip_high": 4.0}),
    "sapo": PolicyLoss(losses.sapo, ("sapo.tau_pos", "sapo.tau_neg"), BY_SEQUENCE),
    "gmpo": PolicyLoss(sequence_losses.gmpo, CLIPS, {"clip_low": 0.4, "clip_high": 0.4} | BY_SEQUENCE),
    "vespo": PolicyLoss(sequence_losses.vespo, ("vespo.k_pos", "vespo.lambda_pos", "vespo.k_neg", "vespo.lambda_neg")),
    "dppo_tv": PolicyLoss(losses.dppo, DPPO, {"clip_low": 0.15, "clip_high": 0.15}, {"divergence": "tv"}),
    "dppo_kl": PolicyLoss(losses.dppo, DPPO, {"clip_low": 0.05, "clip_high": 0.05}, {"divergence": "kl"}),
    "gpg": PolicyLoss(losses.gpg),
    "clip_cov": PolicyLoss(
        clip_cov.clip_cov,
        CLIPS,
        {"clip_low": 0.2, "clip_high": 0.2},
        token_selection=clip_cov.clip_cov_choice,
        token_selection_reads=(*CLIPS, "clip_cov.clip_cov_ratio", "clip_cov.clip_cov_lb", "clip_cov.clip_cov_ub"),
    ),
    "kl_cov": PolicyLoss(
        clip_cov.kl_cov,
        ("kl_cov.ppo_kl_coef",),
        token_selection=clip_cov.kl_cov_choice,
        token_selection_reads=("kl_cov.kl_cov_ratio",),
    ),
    "dro": PolicyLoss(losses.dro, ("dro.dro_beta",)),
}

READ = frozenset(key for loss in LOSSES.values() for key in loss.keys)
"""Config keys below `algorithm` that only policy losses read."""
