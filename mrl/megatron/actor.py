"""The actor on this rank: scores and updates, with the reference as a second set of weights in the same modules.

Owns the swap of weights, and under which distribution tokens are scored. It computes no advantage and knows no
algorithm beyond its `loss`; all ranks call each method together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algorithms._distillation import Distillation
from mrl.algorithms.base import PROXIMAL, REFERENCE, Algorithm, required
from mrl.algorithms.functional.logprobs import Distribution
from mrl.algorithms.functional.sampling import truncates
from mrl.algorithms.functional.sequence_losses import Sequences
from mrl.algorithms.functional.train_infer_mismatch import (
    mismatch_metrics,
    mismatch_sums,
    off_policy_metrics,
    off_policy_sums,
)
from mrl.config.config import Config
from mrl.distributed.collectives import reduce
from mrl.distributed.groups import ProcessGroups
from mrl.errors import UserError
from mrl.megatron.distillation_targets import Comparison
from mrl.megatron.forward_backward import Loss, Microbatch
from mrl.megatron.offload import pinned_like
from mrl.megatron.routing_record import Choices
from mrl.megatron.trainable import Reports, Trainable, in_batch_order
from mrl.models.base import ArchSpec
from mrl.resharding.dtypes import choice_dtype
from mrl.resharding.megatron import stage_layers
from mrl.types import RolloutBatch

DIFFERENCE = "training/rollout_logprobs_diff_max"
DIFFERING = "training/rollout_logprobs_differing"
"""With `rollout.true_on_policy`, of the first minibatch of a step: both are 0."""


class Policy(Trainable):
    """The actor, and further sets of weights for its modules: the reference's, teachers'.

    Attributes:
        comparison: With teachers, where updates compare whole distributions; set by who has them.
    """

    section: ClassVar[str] = "actor"
    loss_metric: ClassVar[str] = "actor/loss"
    samples: ClassVar[bool] = True

    def __init__(self, config: Config, arch: ArchSpec, groups: ProcessGroups, device: torch.device) -> None:
        """Collective over the job: see `Trainable`; samples are scored under what `rollout` draws them from."""
        super().__init__(config, arch, groups, device)
        rollout = config.rollout
        self._sampled = sampled_distribution(config)
        self._whole = Distribution(1.0, config.actor.logprob_chunk_tokens)
        self._truncated = truncates(rollout.top_k, rollout.top_p, rollout.min_p)
        self._reference: dict[str, Tensor] = {}
        self._reference_is_actor = False
        self._aside: dict[str, Tensor] = {}
        distilled = config.distillation
        self._distillation = Distillation(distilled.distillation_loss) if distilled.enabled else None
        self.comparison: Comparison | None = None

    # weights

    def reference_tensors(self) -> dict[str, Tensor]:
        """The reference's tensors in host memory, named as in `layout`; made at the first call, NaN until filled."""
        if not self._reference:
            self._reference = self.weight_set()
        return self._reference

    def take_reference(self) -> None:
        """Collective over data-parallel after an update: the reference becomes the actor of now."""
        live = self.named_tensors()
        with torch.no_grad():
            for name, tensor in self.reference_tensors().items():
                tensor.copy_(live[name])
        self._reference_is_actor = True

    def compare_reference(self) -> None:
        """Collective over the ranks that train: to be called after `reference_tensors` were filled from outside."""
        live, same = self.named_tensors(), True
        for name, tensor in self.reference_tensors().items():
            same = same and torch.equal(tensor.view(torch.uint8), live[name].detach().cpu().view(torch.uint8))
        differing = torch.tensor(int(not same))
        dist.all_reduce(differing)
        self._reference_is_actor = not differing

    @property
    def scores_as_reference(self) -> bool:
        """Whether a score by the actor of now is the reference's in every bit, the same on all ranks.

        Both have the same weights, and the actor's tokens go to experts of its own choice.
        """
        replays = self._config.router_replay == "rollout" and self._arch.moe is not None
        return self._reference_is_actor and not replays

    def weights_changed(self) -> None:
        """See `Trainable`."""
        self._reference_is_actor = False
        super().weights_changed()

    def weight_set(self) -> dict[str, Tensor]:
        """Another set of weights for these modules, in host memory, named as in `layout`; NaN until filled."""
        make = pinned_like if self.device.type == "cuda" else torch.empty_like
        return {name: make(tensor).fill_(torch.nan) for name, tensor in self.named_tensors().items()}

    @contextmanager
    def reference(self) -> Iterator[None]:
        """`holding` the reference's weights."""
        if not self._reference:
            raise RuntimeError("there is no reference: fill reference_tensors first")
        with self.holding(self._reference):
            yield

    @contextmanager
    def holding(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the modules hold a `weight_set`; the actor's weights come back unchanged, also after an error.

        Its model routes by its own choice, whatever is replayed to the actor.
        """
        replay, self._schedule.replay = self._schedule.replay, False
        try:
            with self._held(weights):
                yield
        finally:
            self._schedule.replay = replay

    @contextmanager
    def _held(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        live = self.named_tensors()
        if self.device.type == "cuda":
            if not self._aside:
                self._aside = {name: pinned_like(tensor) for name, tensor in live.items()}
            _copy(live, self._aside)
            _copy(weights, live)
            try:
                yield
            finally:
                _copy(self._aside, live)
            return
        parameters = [dict(chunk.named_parameters()) for chunk in self.chunks]
        for index, found in enumerate(parameters):
            for name, parameter in found.items():
                parameter.data = weights[f"chunk{index}.{name}"]
        try:
            yield
        finally:
            for index, found in enumerate(parameters):
                for name, parameter in found.items():
                    parameter.data = live[f"chunk{index}.{name}"]

    # scoring and training

    def score(self, batch: RolloutBatch, *, supervised: bool = False) -> tuple[Tensor, Tensor]:
        """Collective over the job: log-probability and entropy at every response token as sampled, no gradient.

        Args:
            batch: This data-parallel index's sequences, the same on its tp and pp ranks; maybe none. Under truncation
                they are scored under what the engine kept, `support_R`, whatever these weights would keep.
            supervised: They are the data's: under the model's own distribution, as `update` sees them.

        Returns:
            logprobs_R and entropy_R, fp32 on the CPU, in the batch's order, the same on all those ranks.

        Raises:
            RuntimeError: The engine truncates, and the batch does not say what it kept.
        """
        if not supervised:
            self._check(batch)
        scored = self._scored(batch, self._whole if supervised else self._sampled, 2)
        return scored[0], scored[1]

    def proximal(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Collective over the job: as `score`, by the weights that sampled.

        With `actor.router_replay=recompute` the batch gets `routed_experts_P`: where its tokens went in this pass.
        """
        if self._config.router_replay != "recompute" or self._arch.moe is None:
            return self.score(batch)
        layers = stage_layers(self._arch, self._groups.grid)[self._groups.coords.pp]
        moe = self._arch.moe
        choices = Choices(self._groups, num_layers=len(layers), top_k=moe.top_k, dtype=choice_dtype(moe.num_experts))
        batch.routed_experts_P = None
        self._check(batch)
        scored = self._scored(batch, self._sampled, 2, choices)
        return scored[0], scored[1]

    def own_scores(self, algorithm: Algorithm) -> list[str]:
        """What the first update of a step gives `algorithm.loss` itself: log-probabilities at the weights before it.

        They are, to the bit, those of `proximal` or `score` over the same sequences, which then need not be called.
        With `actor.router_replay=recompute` there are none: updates are told where `proximal` sent the tokens.
        """
        if algorithm.supervised or (self._config.router_replay == "recompute" and self._arch.moe is not None):
            return []
        found = [PROXIMAL] if algorithm.needs_proximal else []
        if algorithm.needs_reference and self.scores_as_reference:
            found.append(REFERENCE)
        return [name for name in found if name not in algorithm.reads_early]

    def update(self, minibatch: RolloutBatch, algorithm: Algorithm, *, compare: bool = False) -> dict[str, float]:
        """Collective over the job: one optimizer step on a minibatch.

        Args:
            minibatch: This data-parallel index's part, `weights_R` set; maybe none.
            algorithm: Its `loss` is minimised. A supervised one sees the model's own distribution: temperature 1, the
                whole vocabulary; any other that of `rollout`, from which was sampled, see `score`.
            compare: No update of the step has moved the weights: also report how what sampled and the actor differ.
                What is None of `own_scores` is set, on ranks of the last pipeline stage.

        Returns:
            The algorithm's metrics over the global minibatch, actor/grad_norm (before clipping), actor/lr, and of a
            mixture of experts `LoadBalance.metrics`, the same on all ranks.

        Raises:
            UserError: The gradient is not finite.
        """
        if self._schedule.replay and not algorithm.supervised:
            required(minibatch.routed_experts_P, "routed_experts_P")
        if not algorithm.supervised:
            self._check(minibatch)

        own = [name for name in self.own_scores(algorithm) if compare and getattr(minibatch, name) is None]

        def before(microbatches: list[Microbatch], reports: Reports) -> dict[str, float]:
            logprobs_R = in_batch_order(minibatch, microbatches, reports, 2)[0]
            for name in own:
                setattr(minibatch, name, logprobs_R)
            return self._mismatch(minibatch, logprobs_R)

        distribution, loss = self._sampled, algorithm.checked_loss
        if algorithm.supervised:
            distribution = self._whole
        elif self._distillation is not None:
            loss = self._distillation.beside(algorithm)
            self._schedule.comparison = self.comparison.on(self.device) if self.comparison else None
        if own:
            loss = _with_own(loss, own)
        try:
            metrics = self._step(
                minibatch,
                distribution,
                loss,
                before if compare else None,
                whole_groups=algorithm.learns_from == "pairs",
            )
        finally:
            self._schedule.comparison = None
            self._reference_is_actor = False
        return algorithm.told(metrics)

    def _refuse(self, metrics: dict[str, float]) -> None:
        if metrics.get(DIFFERENCE, 0.0):
            error = UserError(
                f"rollout.true_on_policy=true, but the actor's log-probabilities of {metrics[DIFFERING]:.0f} "
                f"tokens of this minibatch are not the engine's, by {metrics[DIFFERENCE]:.3g} at most: the weights "
                "that sampled are not the actor's, or the two compute otherwise. The update was not made, and the last "
                "checkpoint is not affected. Without the mode the run would go on, and report "
                "training/rollout_probs_diff_max."
            )
            error.everywhere = True
            raise error

    def _check(self, batch: RolloutBatch) -> None:
        if self._truncated and self._is_last_stage and batch.support_R is None:
            raise RuntimeError(
                "rollout.top_k, top_p or min_p drops tokens, and the samples came without those that were kept"
            )

    def _mismatch(self, batch: RolloutBatch, logprobs_R: Tensor) -> dict[str, float]:
        """Collective over data-parallel: how the policy that sampled differs from the actor."""
        sequences = Sequences(batch.response_mask_R, batch.sequence_R, batch.num_sequences)
        sums, largest = mismatch_sums(batch.rollout_logprobs_R, logprobs_R, batch.response_mask_R)
        more, extremes = off_policy_sums(batch.rollout_logprobs_R, logprobs_R, sequences)
        added, most = torch.cat([sums, more]), torch.cat([largest[None], extremes])
        reduce(added, self._groups.dp)
        reduce(most, self._groups.dp, dist.ReduceOp.MAX)
        sums, more = added[: sums.numel()], added[sums.numel() :]
        found = mismatch_metrics(sums, most[0]) | off_policy_metrics(more, most[1:], float(sums[0]))
        return found | self._differences(batch, logprobs_R) if self._exact else found

    def _differences(self, batch: RolloutBatch, logprobs_R: Tensor) -> dict[str, float]:
        """Collective over data-parallel: how many trained tokens' log-probabilities differ in any bit, and how far."""
        diff_R = (logprobs_R - batch.rollout_logprobs_R)[batch.response_mask_R].abs().double()
        count = (~(diff_R == 0.0)).sum()  # what is not a number differs
        largest = torch.cat([diff_R.nan_to_num(nan=torch.inf), diff_R.new_zeros(1)]).max()
        reduce(count, self._groups.dp)
        reduce(largest, self._groups.dp, dist.ReduceOp.MAX)
        return {DIFFERENCE: float(largest), DIFFERING: float(count)}


def _with_own(loss: Loss, names: Sequence[str]) -> Loss:
    """The loss of microbatches that have these log-probabilities from the forward that it is of."""

    def found(logprobs_R: Tensor, *rest: Any) -> tuple[Tensor, dict[str, Tensor]]:
        *others, microbatch = rest
        known = dict.fromkeys(names, logprobs_R.detach())
        return loss(logprobs_R, *others, replace(microbatch, **known))

    return found


def sampled_distribution(config: Config) -> Distribution:
    """The sampling contract: what the engine sampled from, over the tokens that it kept (`RolloutBatch.support_R`)."""
    return Distribution(config.rollout.temperature, config.actor.logprob_chunk_tokens)


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name], non_blocking=True)
    torch.cuda.synchronize()
