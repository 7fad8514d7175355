"""A trainable model on this rank: its chunks, data-parallel wrappers, forward-backward schedule and optimizer.

Subclasses (`actor.py`, `critic.py`) define what is scored and which loss is minimised.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algorithms.functional.learning_rate import LearningRate
from mrl.algorithms.functional.logprobs import Distribution
from mrl.config.config import Config, LoraConfig
from mrl.config.megatron_fields.defaults import equal_lengths
from mrl.config.megatron_fields.fp8 import row_unit
from mrl.distributed.collectives import all_reduce_, broadcast_object
from mrl.distributed.groups import ProcessGroups
from mrl.errors import UserError
from mrl.megatron.config_passthrough import check_te
from mrl.megatron.ddp import DataParallelChunks
from mrl.megatron.forward_backward import ForwardBackward, Loss
from mrl.megatron.lora import Adapters
from mrl.megatron.microbatch import PackedMicrobatch
from mrl.megatron.model import build_chunks, named_tensors
from mrl.megatron.moe import load_balance
from mrl.megatron.offload import PARTS, Offload, Part
from mrl.megatron.optimizer import build_optimizer, learning_rate_of, optimizer_tensors, reload_masters
from mrl.megatron.param_broadcast import first_here
from mrl.megatron.router import Router, update_biases
from mrl.megatron.routing_record import RoutingRecorder
from mrl.models.base import ArchSpec
from mrl.models.transformer_engine import lacks_attention, supports_prefix_sharing, why_local
from mrl.resharding.checksum import bits, model_checksum
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Layout
from mrl.resharding.megatron import OUTPUT, megatron_layout, rank_tensors, stage_moe_layers
from mrl.resharding.merged_weights import MergedWeights
from mrl.resharding.regions import slices
from mrl.types import RolloutBatch, ragged_indices

Reports = list[dict[str, Tensor]]
"""Metrics that the loss reported for each microbatch, with its "scores" [n, R]; on the last pipeline stage."""


ExtraMetrics = Callable[[list[PackedMicrobatch], Reports], dict[str, float]]
"""(microbatches, reports) -> metrics that need the scores of the full minibatch."""


class TrainableModel:
    """Base class of actor, critic and forward-only models: the weights of one model on this rank, and their optimizer.

    Attributes:
        chunks: GPTModel chunks of this rank, by virtual stage.
        adapters: Low-rank adapters, the only weights that are trained; None without `actor.lora`.
        device: Device of this rank.
        optimizer: Megatron's optimizer; None before `start_optimizer`.
        num_updates: Optimizer steps since `start_optimizer`, skipped ones too.
        num_skipped: Steps that `grad_norm_skip_threshold` skipped.
    """

    section: ClassVar[str]
    """Config section with the learning rate and offload settings; also the prefix of the metrics."""

    loss_metric: ClassVar[str]
    """Name of the loss among the metrics."""

    skipped_metric: ClassVar[str]
    """Name of the metric that is 1 if Megatron skipped the update, else 0."""

    used_by_engine: ClassVar[bool] = False
    """True if the engine samples with these weights; with `rollout.true_on_policy` the model then computes like the
    engine."""

    trained: ClassVar[bool] = True
    """False if the model never gets gradients."""

    def __init__(self, config: Config, arch: ArchSpec, groups: ProcessGroups, device: torch.device) -> None:
        """Collective over the job: builds the model; its parameters are NaN until `named_tensors` are filled.

        Args:
            config: Sections model, parallel, actor (the model's own) and rollout.
            arch: Architecture of the model.
            groups: Process groups, from `parallel_state.initialize`.
            device: Device of the model.
        """
        self._config, self._arch, self._groups, self.device = config.actor, arch, groups, device
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._te = why_local(config, arch, device.type) is None
        self._exact = self.used_by_engine and config.rollout.true_on_policy
        self._balance, self._megatron = load_balance(arch, config.actor), config.megatron
        self.chunks = build_chunks(
            arch,
            config.parallel,
            config.actor,
            dtype=self._dtype,
            te=self._te,
            balance=self._balance,
            megatron=config.megatron,
            exact_positions=config.rollout.max_sequence_length if self._exact else 0,
            device=device,
        )
        for chunk in self.chunks:
            chunk.to(device)
        self.adapters = self._add_adapters(config.actor.lora)
        self._data_parallel = DataParallelChunks(
            self.chunks,
            config,
            te=self._te,
            trained=self.trained,
            after_backward=None if self.adapters is None else self.adapters.sum_partial_gradients,
        )
        if self.used_by_engine and not config.actor.param_offload:  # shared memory cannot be freed for offloading
            self._data_parallel.share_memory()
        self._forward_backward = ForwardBackward(
            self._data_parallel.chunks,
            groups,
            device,
            max_tokens=config.actor.max_tokens_per_microbatch,
            te=self._te and not lacks_attention(arch),
            share_prefixes=config.actor.use_prefix_grouper and (not self._te or supports_prefix_sharing(config, arch)),
            num_experts=arch.moe.num_experts if arch.moe else 0,
            layers=stage_moe_layers(arch, groups.grid)[groups.coords.pp],
            equal_lengths=groups.grid.ep > 1 and equal_lengths(config.actor, config.megatron),
            replay=config.actor.router_replay != "none",
            compiled=self.chunks[0].compiled,
            row_unit=row_unit(groups.grid, config.megatron.transformer),
            conv_kernel=None if arch.linear_attention is None else arch.linear_attention.conv_kernel,
        )
        actor = config.actor
        offloaded = zip(PARTS, (actor.param_offload, actor.grad_offload, actor.optimizer_offload), strict=True)
        self._offload = Offload([part for part, leaves in offloaded if leaves], device)
        self._learning_rate: LearningRate | None = None
        self.optimizer: Any = None
        self._base_checksum: str | None = None
        self._owner: TrainableModel | None = None
        self.num_updates = self.num_skipped = 0

    def _add_adapters(self, lora: LoraConfig) -> Adapters | None:
        if not lora.rank or not self.trained:
            return None
        own_dtype = str(self._dtype).removeprefix("torch.")
        dtype = lora.dtype or own_dtype
        if self._te and dtype != own_dtype:
            refusal = UserError(
                f"{self.section}.lora.dtype={dtype} with model.dtype={own_dtype}: TransformerEngine's layers take "
                f"parameters of one dtype. Remove {self.section}.lora.dtype, or set actor.transformer_impl=local."
            )
            refusal.on_all_ranks = True
            raise refusal
        return Adapters(self.chunks, self._arch, self._groups, lora, dtype=dtype, te=self._te)

    @property
    def groups(self) -> ProcessGroups:
        """Process groups of the layout."""
        return self._groups

    @property
    def uses_te(self) -> bool:
        """True if the layers are TransformerEngine's."""
        return self._te

    @property
    def share_prefixes(self) -> bool:
        """True if a prompt shared by several sequences is computed once; may be set between batches."""
        return self._forward_backward.share_prefixes

    @share_prefixes.setter
    def share_prefixes(self, once: bool) -> None:
        self._forward_backward.share_prefixes = once

    # memory

    def offload(self, *, keep: Collection[Part] = ()) -> None:
        """Collective over data-parallel after an update: moves the parts that `*_offload` names to host memory.

        Every method moves back what it needs.

        Args:
            keep: Parts that stay on the device.
        """
        self._data_parallel.gather()
        self._offload.offload(self._tensors_of, keep=keep)

    def onload(self, *parts: Part) -> None:
        """Collective over data-parallel after an update: moves these parts to the device, with the weights gathered.

        For callers that read or write them directly.
        """
        self._onload(*parts)
        if "weights" in parts:
            self._data_parallel.gather()

    def _onload(self, *parts: Part) -> None:
        if self._owner is not None and "weights" in parts:
            self._owner.onload("weights")
        self._offload.onload(*parts)

    @property
    def borrows_weights(self) -> bool:
        """True if the frozen weights are those of another model, see `borrow_weights`."""
        return self._owner is not None

    def borrow_weights(self, owner: TrainableModel) -> None:
        """Uses the memory of another model's weights for the frozen weights; both models have adapters.

        Args:
            owner: Model with the same layers, in the same layout, whose weights stay as they are.
        """
        found = owner.named_tensors()
        for index, chunk in enumerate(self.chunks):
            for name, tensor in chunk.named_weights():
                if not tensor.requires_grad:
                    tensor.data = found[f"chunk{index}.{name}"]
        self._owner = owner

    def _tensors_of(self, part: Part) -> Iterator[Tensor]:
        if part == "weights":
            for chunk in self.chunks:
                yield from (each for each in chunk.parameters() if self._owner is None or each.requires_grad)
        elif part == "gradients":
            yield from self._data_parallel.gradients()
        elif self.optimizer is not None:
            yield from optimizer_tensors(self.optimizer)

    # weights

    def named_tensors(self) -> dict[str, Tensor]:
        """Collective over data-parallel after an update: returns the weights of this rank, named as in `layout`.

        The tensors are live: writing to them changes the model. Adapters are not among them.
        """
        self.onload("weights")
        found, adapters = named_tensors(self.chunks), () if self.adapters is None else self.adapters.layout()
        return {name: tensor for name, tensor in found.items() if name not in adapters}

    def trained_tensors(self) -> dict[str, Tensor]:
        """Collective over data-parallel after an update: returns the live tensors that training changes.

        These are the adapters if there are any, named as in their layout, else all weights. A value head beside
        adapters is not among them.
        """
        if self.adapters is None:
            return self.named_tensors()
        self.onload("weights")
        parameters = self.adapters.named_parameters()
        data = {parameter: parameter.data for parameter in parameters.values()}  # several names may share one
        return {name: data[parameter] for name, parameter in parameters.items()}

    def merged_tensors(self) -> Mapping[str, Tensor]:
        """Collective over data-parallel after an update: returns the weights with the adapters merged into them.

        Merged tensors are computed at each access, from the adapters as they are then; without adapters the tensors are
        those of `named_tensors`.
        """
        if self.adapters is None:
            return self.named_tensors()
        return MergedWeights(self.named_tensors(), self.trained_tensors(), self.adapters.matrices, self.adapters.scale)

    def base_checksum(self) -> str:
        """Collective over the training ranks: returns a hash of the weights without adapters, 16 hex digits.

        It depends on the weights and their dtype, not on the parallel layout.
        """
        if self._base_checksum is None:
            tensors, own = self.named_tensors(), first_here(self.chunks)
            numbers = {name: number for number, name in enumerate(hf_layout(self._arch, ""))}
            sums = torch.zeros(len(numbers), dtype=torch.int64)  # of the bits of each Hugging Face tensor
            placed = rank_tensors(self._arch, self._groups.grid, self._groups.rank, dtype="")
            own_cut = self._groups.grid.expert_coords(self._groups.rank).etp
            for name, place in zip(self.layout(), placed, strict=True):
                cut = own_cut if place.spec.kind.is_expert else self._groups.coords.tp
                is_repeated = place.is_copy or (place.is_replicated and cut > 0)
                is_trained = self._arch.value_head and name.endswith(OUTPUT)
                if name in own and not is_repeated and not is_trained:
                    for piece in place.stored.pieces:
                        sums[numbers[piece.hf_name]] += bits(tensors[name][slices(piece.dst)]).cpu()
            dist.all_reduce(sums)
            self._base_checksum = model_checksum(sums)
        return self._base_checksum

    def layout(self) -> Layout:
        """Returns the description of this rank's tensors, in Hugging Face coordinates."""
        dtype = str(self._dtype).removeprefix("torch.")
        return megatron_layout(self._arch, self._groups.grid, self._groups.rank, dtype=dtype, te=self._te)

    def weights_changed(self) -> None:
        """Reloads the optimizer's master weights; must be called after parameters were written from outside."""
        self._base_checksum = None
        if self.optimizer is not None:
            self.onload("weights", "optimizer")
            reload_masters(self.optimizer)

    # scoring and training

    def start_optimizer(self, learning_rate: LearningRate) -> None:
        """Collective over the job: creates a new optimizer for the current weights, with a learning-rate schedule."""
        self.onload(*PARTS)
        bf16 = self._dtype == torch.bfloat16
        check_te("optimizer", self._megatron.optimizer, te=self._te)
        self.optimizer = build_optimizer(
            self._data_parallel.chunks, self._config, bf16=bf16, dtype=self._dtype, given=self._megatron.optimizer
        )
        self._learning_rate = learning_rate
        self.num_updates = self.num_skipped = 0

    def set_lr_schedule(self, learning_rate: LearningRate) -> None:
        """Replaces the learning-rate schedule; the optimizer's state is kept."""
        self._learning_rate = learning_rate

    def _score(
        self,
        batch: RolloutBatch,
        distribution: Distribution,
        count: int,
        routing_recorder: RoutingRecorder | None = None,
    ) -> Tensor:
        """Collective over the job: returns `count` scores of every response token, without gradient.

        Args:
            batch: Sequences of this data-parallel index, the same on its tp and pp ranks; may be empty.
            distribution: Distribution under which tokens are scored.
            count: Number of scores per token that the last stage computes.
            routing_recorder: Recorder of the experts of each token, which sets the batch's `routed_experts_P`.

        Returns:
            Scores [count, R], fp32 (fp64 for an fp64 model) on the CPU, in the batch's order, the same on all ranks of
                the index.
        """
        self.onload("weights")
        microbatches = self._forward_backward.microbatches(batch, distribution)
        with torch.no_grad():
            reports = self._forward_backward.run(
                microbatches, _no_loss, backward=False, routing_recorder=routing_recorder
            )
        if routing_recorder is not None:
            batch.routed_experts_P = routing_recorder.in_batch_order(
                batch, [(micro.rows, micro.row_I) for micro in microbatches]
            )
        scored = torch.zeros(
            count, batch.response_mask_R.numel(), dtype=torch.promote_types(torch.float32, self._dtype)
        )
        if self._is_last_stage:
            scored = in_batch_order(batch, microbatches, reports, count)
        self._broadcast_from_last_stage(scored)
        return scored

    def final_hidden_states(self, batch: RolloutBatch) -> Tensor:
        """Collective over the job: returns the final hidden state that predicts each response token, without gradient.

        Args:
            batch: Sequences of this data-parallel index, the same on its tp and pp ranks; may be empty.

        Returns:
            [R, H] in the model's dtype on the CPU, in the batch's order; [R, 0] except on the last pipeline stage.
        """
        self.onload("weights")
        microbatches = self._forward_backward.microbatches(batch, None)
        with torch.no_grad():
            reports = self._forward_backward.run(microbatches, _no_loss, backward=False)
        if not self._is_last_stage:
            return torch.zeros(batch.response_mask_R.numel(), 0, dtype=self._dtype)
        return in_batch_order(batch, microbatches, reports, self._arch.hidden_size).T.contiguous()

    def _step(
        self,
        minibatch: RolloutBatch,
        distribution: Distribution,
        loss: Loss,
        extra_metrics: ExtraMetrics | None = None,
        *,
        keep_groups_together: bool = False,
    ) -> dict[str, float]:
        """Collective over the job: takes one optimizer step.

        Args:
            minibatch: Part of this data-parallel index, with token weights set; may be empty.
            distribution: Distribution under which tokens are scored.
            loss: Loss to minimise.
            extra_metrics: Function called on the last pipeline stage for metrics of all the minibatch's scores.
            keep_groups_together: True if all sequences of a group must be in one microbatch.

        Returns:
            The loss's metrics over the global minibatch, grad_norm (before clipping), lr, and for MoE models
            `LoadBalance.metrics`, the same on all ranks.

        Raises:
            UserError: The gradient is not finite.
        """
        if self.optimizer is None or self._learning_rate is None:
            raise RuntimeError("update was called before start_optimizer")
        self._onload(*PARTS)  # with overlap_param_gather, the forward gathers the weights layer by layer
        rate = self._learning_rate.at(self.num_updates)
        self._set_rates(rate)
        self._data_parallel.zero_gradients()
        microbatches = self._forward_backward.microbatches(
            minibatch, distribution, keep_groups_together=keep_groups_together
        )
        if self._balance is not None:
            self._balance.start([micro.packed.routing for micro in microbatches], self._groups.dp_cp)
        reports = self._forward_backward.run(microbatches, loss, backward=True)
        metrics = self._reduce_metrics(microbatches, reports, extra_metrics)
        self._check_metrics(metrics)
        if self._balance is not None:
            balance = self._balance.metrics().items()
            metrics |= {name.replace("actor/", f"{self.section}/"): value for name, value in balance}
        is_updated, grad_norm, _ = self.optimizer.step()
        if "grad_norm_skip_threshold" in self._megatron.optimizer:
            metrics[self.skipped_metric] = float(not is_updated)
            self.num_skipped += not is_updated
        if is_updated:
            metrics |= self._update_biases()
        self.optimizer.zero_grad()  # frees fp32 copies of gradients, if the buffer has another dtype
        self._data_parallel.mark_updated()
        self.num_updates += 1
        if not torch.isfinite(torch.tensor(float(grad_norm))):
            error = UserError(
                f"the {self.section}'s gradient norm is {grad_norm} at optimizer step {self.num_updates}, with loss "
                f"{metrics.get(self.loss_metric)}. The last checkpoint is not affected; lower {self.section}.lr or "
                "check the rewards."
            )
            error.on_all_ranks = True
            raise error
        return metrics | {f"{self.section}/grad_norm": float(grad_norm), f"{self.section}/lr": rate}

    def _set_rates(self, rate: float) -> None:
        """Sets the learning rate and the weight decay of every parameter."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_of(group, rate, self._config)
            group["weight_decay"] = self._config.weight_decay * group.get("wd_mult", 1.0)

    def _update_biases(self) -> dict[str, float]:
        """Collective over the job: moves the routers' selection biases if the config says so; returns their metric.

        A critic may have no biases although the actor has, or adapters, with which its own weights stay as they are.
        """
        rate, moe = self._config.moe_router_bias_update_rate, self._arch.moe
        if not rate or self.adapters is not None or moe is None or not moe.score_bias:
            return {}
        routers = [each for chunk in self.chunks for each in chunk.modules() if isinstance(each, Router)]
        return {f"{self.section}/moe_router_bias_max": update_biases(routers, rate)}

    def _check_metrics(self, metrics: dict[str, float]) -> None:
        """Raises, on all ranks, if the metrics of a step forbid its update; called before the update."""

    def _reduce_metrics(
        self, microbatches: list[PackedMicrobatch], reports: Reports, extra_metrics: ExtraMetrics | None
    ) -> dict[str, float]:
        """Collective over the model's replicas: sums the reports over microbatches and data-parallel ranks."""
        found: dict[str, float] | None = None
        if self._is_last_stage:
            names = [name for name in reports[0] if name != "scores"]
            found = self._reduce_over_dp(
                {name: torch.stack([report[name].double() for report in reports]) for name in names}
            )
            if extra_metrics is not None:
                found |= extra_metrics(microbatches, reports)
        metrics: dict[str, float] = broadcast_object(self._last_stage_rank, found, self._groups.pp)
        return metrics

    def _reduce_over_dp(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Collective over data-parallel: sums each name's values; names that end in max or min are reduced by that."""
        found: dict[str, float] = {}
        for ending, pick, operation in (
            ("max", torch.Tensor.max, dist.ReduceOp.MAX),
            ("min", torch.Tensor.min, dist.ReduceOp.MIN),
            ("", torch.Tensor.sum, dist.ReduceOp.SUM),
        ):
            names = [name for name in values if name not in found and name.endswith(ending)]
            if names:
                reduced = torch.stack([pick(values[name]) for name in names]).cpu()
                all_reduce_(reduced, self._groups.dp, operation)
                found |= dict(zip(names, reduced.tolist(), strict=True))
        return {name: found[name] for name in values}

    @property
    def _last_stage_rank(self) -> int:
        return self._groups.grid.rank(replace(self._groups.coords, pp=self._groups.grid.pp - 1))

    @property
    def _is_last_stage(self) -> bool:
        return self._groups.rank == self._last_stage_rank

    def _broadcast_from_last_stage(self, tensor: Tensor) -> None:
        """Collective over the pipeline: copies the last stage's values to every stage, in place."""
        if self._groups.grid.pp > 1:
            dist.broadcast(tensor, src=self._last_stage_rank, group=self._groups.pp)


def in_batch_order(batch: RolloutBatch, microbatches: list[PackedMicrobatch], reports: Reports, count: int) -> Tensor:
    """Returns the first `count` scores [count, R] of a batch, assembled from those of its microbatches, on the CPU."""
    scored = torch.zeros(count, batch.response_mask_R.numel(), dtype=reports[0]["scores"].dtype)
    for micro, report in zip(microbatches, reports, strict=True):
        if micro.rows:
            index_R = ragged_indices(batch.response_lens_B, torch.tensor(micro.rows))
            scored[:, index_R] = report["scores"][:count].cpu()
    return scored


def _no_loss(*scores_and_microbatch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return scores_and_microbatch[0].new_zeros(()), {}
