"""The actor on this rank: scoring and updates, with the reference as a second set of weights for the same modules.

It computes no advantages and uses only `loss` of an algorithm. All ranks call each method together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
from mrl.distributed.collectives import all_reduce_
from mrl.distributed.groups import ProcessGroups
from mrl.errors import UserError
from mrl.megatron.distillation_targets import DistillationSpec
from mrl.megatron.forward_backward import Loss
from mrl.megatron.microbatch import PackedMicrobatch
from mrl.megatron.offload import pinned_like
from mrl.megatron.routing_record import RoutingRecorder
from mrl.megatron.trainable_model import Reports, TrainableModel, in_batch_order
from mrl.models.base import ArchSpec
from mrl.resharding.dtypes import expert_index_dtype
from mrl.resharding.megatron import stage_moe_layers
from mrl.types import RolloutBatch

DIFFERENCE = "training/rollout_logprobs_diff_max"
DIFFERING = "training/rollout_logprobs_differing"
"""Metrics of a step's first minibatch with `rollout.true_on_policy`; both must be 0."""


class Actor(TrainableModel):
    """The actor, with further sets of weights for its modules (reference, teachers).

    Attributes:
        distillation: Teachers' output weights, if updates compare full distributions; set by the trainer.
    """

    section: ClassVar[str] = "actor"
    loss_metric: ClassVar[str] = "actor/loss"
    skipped_metric: ClassVar[str] = "actor/update_skipped"
    used_by_engine: ClassVar[bool] = True

    def __init__(self, config: Config, arch: ArchSpec, groups: ProcessGroups, device: torch.device) -> None:
        """Collective over the job: builds the model, see `TrainableModel`.

        Args:
            config: Config; samples are scored under the distribution that `rollout` samples from.
            arch: Architecture of the model.
            groups: Process groups of the layout.
            device: Device of this rank.
        """
        super().__init__(config, arch, groups, device)
        rollout = config.rollout
        self._sampling_distribution = sampled_distribution(config)
        self._full_distribution = Distribution(1.0, config.actor.logprob_chunk_tokens)
        self._truncated = truncates(rollout.top_k, rollout.top_p, rollout.min_p)
        self._reference: dict[str, Tensor] = {}
        self._reference_is_actor = self._reference_is_base = False
        self._saved_weights: dict[str, Tensor] = {}
        distilled = config.distillation
        self._distillation = Distillation(distilled.distillation_loss) if distilled.enabled else None
        self.distillation: DistillationSpec | None = None

    # weights

    def reference_tensors(self) -> dict[str, Tensor]:
        """Returns the reference's tensors in host memory, NaN until filled by the caller.

        They are named as in `trained_tensors`: with adapters, the reference has adapters of its own, which are zero if
        it is the model without adapters. They are allocated at the first call.
        """
        if not self._reference:
            self._reference = self._empty_like(self.trained_tensors())
        return self._reference

    def copy_to_reference(self) -> None:
        """Collective over the training ranks: copies the actor's current weights into the reference."""
        live = self.trained_tensors()
        with torch.no_grad():
            for name, tensor in self.reference_tensors().items():
                tensor.copy_(live[name])
        self._reference_is_actor = True
        self._check_reference_adapters()

    def compare_reference(self) -> None:
        """Collective over the training ranks: records whether the reference's weights equal the actor's, bit for bit.

        To be called after `reference_tensors` were filled from outside.
        """
        live, same = self.trained_tensors(), True
        for name, tensor in self.reference_tensors().items():
            same = same and torch.equal(tensor.view(torch.uint8), live[name].detach().cpu().view(torch.uint8))
        differing = torch.tensor(int(not same))
        dist.all_reduce(differing)
        self._reference_is_actor = not differing
        self._check_reference_adapters()

    def _check_reference_adapters(self) -> None:
        """Collective over the training ranks: records whether the reference is the model without adapters."""
        self._reference_is_base = self.adapters is not None and self.adapters.are_zero(self._reference)

    @property
    def equals_reference(self) -> bool:
        """True if the actor's scores equal the reference's bit for bit, the same on all ranks.

        This needs equal weights, and that no sampled expert routing is replayed.
        """
        replays = self._config.router_replay == "rollout" and self._arch.moe is not None
        return self._reference_is_actor and not replays

    def weights_changed(self) -> None:
        """Implements `TrainableModel.weights_changed`."""
        self._reference_is_actor = False
        super().weights_changed()

    def empty_weights(self) -> dict[str, Tensor]:
        """Allocates a set of weights for these modules in host memory, named as in `layout`; NaN until filled."""
        return self._empty_like(self.named_tensors())

    def _empty_like(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        make = pinned_like if self.device.type == "cuda" else torch.empty_like
        made = {id(tensor): tensor for tensor in tensors.values()}  # several names may share one
        made = {key: make(tensor).fill_(torch.nan) for key, tensor in made.items()}
        return {name: made[id(tensor)] for name, tensor in tensors.items()}

    @contextmanager
    def using_reference(self) -> Iterator[None]:
        """Runs the body with the reference's weights, or without adapters if those of the reference are zero."""
        if not self._reference:
            raise RuntimeError("there is no reference: fill reference_tensors() first")
        if self._reference_is_base:
            with self.without_adapters():
                yield
        else:
            with self._without_replay(), self._swap_weights(self._reference):
                yield

    @contextmanager
    def using_weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Runs the body with another set of weights and without adapters; afterwards, also after an error, as before.

        Routing is not replayed inside: this model's router chooses the experts.

        Args:
            weights: Tensors from `empty_weights`, filled.
        """
        with self.without_adapters(), self._swap_weights(weights):
            yield

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Runs the body with the model's own weights only. Routing is not replayed inside, as in `using_weights`."""
        disabled = nullcontext() if self.adapters is None else self.adapters.disabled()
        with self._without_replay(), disabled:
            yield

    @contextmanager
    def _without_replay(self) -> Iterator[None]:
        replay, self._forward_backward.replay = self._forward_backward.replay, False
        try:
            yield
        finally:
            self._forward_backward.replay = replay

    @contextmanager
    def _swap_weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Runs the body with other values of the tensors that `weights` names."""
        self.onload("weights")
        swapped = {
            name: tensor
            for index, chunk in enumerate(self.chunks)
            for short, tensor in chunk.named_weights()
            if (name := f"chunk{index}.{short}") in weights
        }
        live = {name: tensor.data for name, tensor in swapped.items()}
        if self.device.type == "cuda":
            for name, tensor in live.items():
                if name not in self._saved_weights:
                    self._saved_weights[name] = pinned_like(tensor)
            saved = {name: self._saved_weights[name] for name in live}
            _copy(live, saved)
            _copy(weights, live)
            try:
                yield
            finally:
                _copy(saved, live)
            return
        for name, tensor in swapped.items():
            tensor.data = weights[name]
        try:
            yield
        finally:
            for name, tensor in swapped.items():
                tensor.data = live[name]

    # scoring and training

    def score(self, batch: RolloutBatch, *, supervised: bool = False) -> tuple[Tensor, Tensor]:
        """Collective over the job: returns log-probability and entropy at every response token, without gradient.

        Args:
            batch: Sequences of this data-parallel index, the same on its tp and pp ranks; may be empty. If sampling was
                truncated, tokens are scored over those that the engine kept, `kept_tokens_R`.
            supervised: True if the batch comes from a data set: scored under the model's own distribution (temperature
                1, full vocabulary), as in `update`.

        Returns:
            logprobs_R and entropy_R, fp32 on the CPU, in the batch's order, the same on all ranks of the index.

        Raises:
            RuntimeError: Sampling was truncated, and the batch has no `kept_tokens_R`.
        """
        if not supervised:
            self._check_support(batch)
        scored = self._score(batch, self._full_distribution if supervised else self._sampling_distribution, 2)
        return scored[0], scored[1]

    def score_proximal(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Collective over the job: returns the result of `score` with the weights before the update.

        With `actor.router_replay=recompute` it also sets `batch.routed_experts_P`, the experts chosen in this pass.
        """
        if self._config.router_replay != "recompute" or self._arch.moe is None:
            return self.score(batch)
        layers = stage_moe_layers(self._arch, self._groups.grid)[self._groups.coords.pp]
        moe = self._arch.moe
        choices = RoutingRecorder(
            self._groups, num_layers=len(layers), top_k=moe.top_k, dtype=expert_index_dtype(moe.num_experts)
        )
        batch.routed_experts_P = None
        self._check_support(batch)
        scored = self._score(batch, self._sampling_distribution, 2, choices)
        return scored[0], scored[1]

    def logprobs_from_update(self, algorithm: Algorithm) -> list[str]:
        """Returns the batch fields that the forward pass of a step's first update can compute for `algorithm.loss`.

        These log-probabilities are bit-identical to those of `score_proximal` or `score` over the same sequences, which
        then need not be called. With `actor.router_replay=recompute` there are none, since updates replay the experts
        that `score_proximal` recorded.
        """
        if algorithm.supervised or (self._config.router_replay == "recompute" and self._arch.moe is not None):
            return []
        found = [PROXIMAL] if algorithm.needs_proximal else []
        if algorithm.needs_reference and self.equals_reference:
            found.append(REFERENCE)
        return [name for name in found if name not in algorithm.reads_early]

    def update(
        self, minibatch: RolloutBatch, algorithm: Algorithm, *, is_first_update: bool = False
    ) -> dict[str, float]:
        """Collective over the job: takes one optimizer step on a minibatch.

        Args:
            minibatch: Part of this data-parallel index, with `weights_R` set; may be empty.
            algorithm: Algorithm whose `loss` is minimised. Supervised algorithms see the model's own distribution
                (temperature 1, full vocabulary), others the sampling distribution, see `score`.
            is_first_update: True if this is the first update of the step. It then also reports metrics of the mismatch
                between sampler and actor, and fields of `logprobs_from_update` that are None are set on ranks of the
                last pipeline stage.

        Returns:
            The algorithm's metrics over the global minibatch, actor/grad_norm (before clipping), actor/lr, and for MoE
            models `LoadBalance.metrics`, the same on all ranks.

        Raises:
            UserError: The gradient is not finite.
        """
        if self._forward_backward.replay and not algorithm.supervised:
            required(minibatch.routed_experts_P, "routed_experts_P")
        if not algorithm.supervised:
            self._check_support(minibatch)

        missing = [
            name
            for name in self.logprobs_from_update(algorithm)
            if is_first_update and getattr(minibatch, name) is None
        ]

        def first_update_metrics(microbatches: list[PackedMicrobatch], reports: Reports) -> dict[str, float]:
            logprobs_R = in_batch_order(minibatch, microbatches, reports, 2)[0]
            for name in missing:
                setattr(minibatch, name, logprobs_R)
            return self._mismatch(minibatch, logprobs_R)

        distribution, loss = self._sampling_distribution, algorithm.checked_loss
        if algorithm.supervised:
            distribution = self._full_distribution
        elif self._distillation is not None:
            loss = self._distillation.training_loss(algorithm)
            self._forward_backward.distillation = self.distillation.on(self.device) if self.distillation else None
        if missing:
            loss = _with_own_logprobs(loss, missing)
        try:
            metrics = self._step(
                minibatch,
                distribution,
                loss,
                first_update_metrics if is_first_update else None,
                keep_groups_together=algorithm.learns_from == "pairs",
            )
        finally:
            self._forward_backward.distillation = None
            self._reference_is_actor = False
        return algorithm.finalize_metrics(metrics)

    def _check_metrics(self, metrics: dict[str, float]) -> None:
        if metrics.get(DIFFERENCE, 0.0):
            error = UserError(
                f"rollout.true_on_policy=true, but the actor's log-probabilities of {metrics[DIFFERING]:.0f} "
                f"tokens of this minibatch differ from the engine's, by up to {metrics[DIFFERENCE]:.3g}: the engine "
                "sampled with other weights, or computes differently. The update was not made, and the last "
                "checkpoint is not affected. With rollout.true_on_policy=false the run would continue and report "
                "training/rollout_probs_diff_max."
            )
            error.on_all_ranks = True
            raise error

    def _check_support(self, batch: RolloutBatch) -> None:
        if self._truncated and self._is_last_stage and batch.kept_tokens_R is None:
            raise RuntimeError(
                "rollout.top_k, top_p or min_p truncates sampling, but the batch has no kept_tokens_R (the kept tokens)"
            )

    def _mismatch(self, batch: RolloutBatch, logprobs_R: Tensor) -> dict[str, float]:
        """Collective over data-parallel: returns the metrics of the mismatch between sampler and actor."""
        sequences = Sequences(batch.response_mask_R, batch.sequence_R, batch.num_sequences)
        sums, largest = mismatch_sums(batch.rollout_logprobs_R, logprobs_R, batch.response_mask_R)
        more, extremes = off_policy_sums(batch.rollout_logprobs_R, logprobs_R, sequences)
        added, most = torch.cat([sums, more]), torch.cat([largest[None], extremes])
        all_reduce_(added, self._groups.dp)
        all_reduce_(most, self._groups.dp, dist.ReduceOp.MAX)
        sums, more = added[: sums.numel()], added[sums.numel() :]
        found = mismatch_metrics(sums, most[0]) | off_policy_metrics(more, most[1:], float(sums[0]))
        return found | self._count_differences(batch, logprobs_R) if self._exact else found

    def _count_differences(self, batch: RolloutBatch, logprobs_R: Tensor) -> dict[str, float]:
        """Collective over data-parallel: counts trained tokens with other log-probabilities; also the largest gap."""
        diff_R = (logprobs_R - batch.rollout_logprobs_R)[batch.response_mask_R].abs().double()
        count = (~(diff_R == 0.0)).sum()  # counts NaN as different
        largest = torch.cat([diff_R.nan_to_num(nan=torch.inf), diff_R.new_zeros(1)]).max()
        all_reduce_(count, self._groups.dp)
        all_reduce_(largest, self._groups.dp, dist.ReduceOp.MAX)
        return {DIFFERENCE: float(largest), DIFFERING: float(count)}


def _with_own_logprobs(loss: Loss, names: Sequence[str]) -> Loss:
    """Wraps a loss: fields `names` of the microbatch are set to the log-probabilities of its own forward pass."""

    def found(logprobs_R: Tensor, *rest: Any) -> tuple[Tensor, dict[str, Tensor]]:
        *others, microbatch = rest
        known = dict.fromkeys(names, logprobs_R.detach())
        return loss(logprobs_R, *others, replace(microbatch, **known))

    return found


def sampled_distribution(config: Config) -> Distribution:
    """Returns the distribution that the engine samples from; truncation comes from `RolloutBatch.kept_tokens_R`."""
    return Distribution(config.rollout.temperature, config.actor.logprob_chunk_tokens)


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name], non_blocking=True)
    torch.cuda.synchronize()
