"""The actor on this rank: scores and updates, with the reference as a second set of weights in the same modules.

Owns the chunks, their data-parallel wrappers, the optimizer and the swap of weights. It computes no advantage and knows
no algorithm beyond its `loss`; all ranks call each method together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algorithms.base import Algorithm, required
from mrl.config import Config
from mrl.distributed.collectives import from_rank
from mrl.distributed.groups import ProcessGroups
from mrl.distributed.transformer_engine import why_local
from mrl.errors import UserError
from mrl.functional.learning_rate import LearningRate
from mrl.functional.logprobs import Distribution
from mrl.functional.mismatch import mismatch_metrics, mismatch_sums
from mrl.functional.sampling import keep_threshold
from mrl.megatron.choices import Choices
from mrl.megatron.data_parallel import Replicas
from mrl.megatron.model import build_chunks, named_tensors
from mrl.megatron.moe import load_balance
from mrl.megatron.offload import PARTS, Offload, Part, pinned_like
from mrl.megatron.optimizer import build_optimizer, optimizer_tensors, reload_masters
from mrl.megatron.passed import check_te
from mrl.megatron.schedule import Microbatch, Schedule
from mrl.models.base import ArchSpec
from mrl.types import RolloutBatch
from mrl.weights.layout import Layout
from mrl.weights.megatron import megatron_layout, stage_layers
from mrl.weights.tensors import choice_dtype


class Policy:
    """The actor, and the reference where one is set.

    Attributes:
        chunks: GPTModel chunks of this rank, by virtual stage.
        device: Of this rank.
        optimizer: Megatron's; None before `start_optimizer`.
        num_updates: Optimizer steps since `start_optimizer`.
    """

    def __init__(self, config: Config, arch: ArchSpec, groups: ProcessGroups, device: torch.device) -> None:
        """Collective over the job: builds the model; parameters are NaN until someone fills `named_tensors`.

        Args:
            config: Sections model, parallel, actor and rollout (samples are scored under what they were drawn from).
            arch: The model.
            groups: From `parallel.initialize`.
            device: Of the model.
        """
        self._config, self._arch, self._groups, self.device = config.actor, arch, groups, device
        self._megatron = config.megatron
        self._dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        self._te = why_local(config, arch, device.type) is None
        self._balance = load_balance(arch, config.actor)
        self.chunks = build_chunks(
            arch,
            config.parallel,
            config.actor,
            dtype=self._dtype,
            te=self._te,
            balance=self._balance,
            megatron=config.megatron,
        )
        for chunk in self.chunks:
            chunk.to(device)
        self._replicas = Replicas(self.chunks, config, te=self._te)
        self._schedule = Schedule(
            self._replicas.chunks,
            groups,
            device,
            max_tokens=config.actor.max_tokens_per_microbatch,
            te=self._te,
            num_experts=arch.moe.num_experts if arch.moe else 0,
            layers=stage_layers(arch, groups.grid)[groups.coords.pp],
            even=groups.grid.ep > 1 and config.actor.moe_token_dispatcher_type == "allgather",
            replay=config.actor.router_replay != "none",
        )
        self._sampled = _sampled_distribution(config)
        self._whole = Distribution(1.0, None, config.actor.logprob_chunk_tokens)
        actor = config.actor
        offloaded = zip(PARTS, (actor.param_offload, actor.grad_offload, actor.optimizer_offload), strict=True)
        self._offload = Offload([part for part, leaves in offloaded if leaves], device)
        self._reference: dict[str, Tensor] = {}
        self._aside: dict[str, Tensor] = {}
        self._learning_rate: LearningRate | None = None
        self.optimizer: Any = None
        self.num_updates = 0

    @property
    def uses_te(self) -> bool:
        """Whether its layers are TransformerEngine's."""
        return self._te

    # memory

    def offload(self, *, keep: Collection[Part] = ()) -> None:
        """Collective over data-parallel after an update: what `actor.*_offload` names goes to host memory.

        Args:
            keep: What stays. Every method brings back what it needs.
        """
        self._replicas.gather()
        self._offload.release(self._tensors_of, keep=keep)

    def bring(self, *parts: Part) -> None:
        """Collective over data-parallel after an update: these parts are on the device, weights whole.

        For those who read or write them from outside.
        """
        self._offload.bring(*parts)
        if "weights" in parts:
            self._replicas.gather()

    def _tensors_of(self, part: Part) -> Iterator[Tensor]:
        if part == "weights":
            for chunk in self.chunks:
                yield from chunk.parameters()
        elif part == "gradients":
            yield from self._replicas.gradients()
        elif self.optimizer is not None:
            yield from optimizer_tensors(self.optimizer)

    # weights

    def named_tensors(self) -> dict[str, Tensor]:
        """Collective over data-parallel after an update: every parameter of this rank by its name in `layout`.

        They are live: writing changes the actor.
        """
        self.bring("weights")
        return named_tensors(self.chunks)

    def layout(self) -> Layout:
        """What this rank stores, in Hugging Face coordinates."""
        dtype = str(self._dtype).removeprefix("torch.")
        return megatron_layout(self._arch, self._groups.grid, self._groups.rank, dtype=dtype, te=self._te)

    def weights_changed(self) -> None:
        """Must be called after parameters were written from outside: the optimizer's master weights follow."""
        if self.optimizer is not None:
            self.bring("weights", "optimizer")
            reload_masters(self.optimizer)

    def reference_tensors(self) -> dict[str, Tensor]:
        """The reference's tensors in host memory, named as in `layout`; made at the first call, NaN until filled."""
        if not self._reference:
            make = pinned_like if self.device.type == "cuda" else torch.empty_like
            self._reference = {name: make(tensor).fill_(torch.nan) for name, tensor in self.named_tensors().items()}
        return self._reference

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the modules hold the reference's weights; the actor's come back unchanged, also after an error.

        The reference routes by its own choice, whatever is replayed to the actor.
        """
        if not self._reference:
            raise RuntimeError("there is no reference: fill reference_tensors first")
        replay, self._schedule.replay = self._schedule.replay, False
        try:
            with self._reference_weights():
                yield
        finally:
            self._schedule.replay = replay

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        live = self.named_tensors()
        if self.device.type == "cuda":
            if not self._aside:
                self._aside = {name: pinned_like(tensor) for name, tensor in live.items()}
            _copy(live, self._aside)
            _copy(self._reference, live)
            try:
                yield
            finally:
                _copy(self._aside, live)
            return
        parameters = [dict(chunk.named_parameters()) for chunk in self.chunks]
        for index, found in enumerate(parameters):
            for name, parameter in found.items():
                parameter.data = self._reference[f"chunk{index}.{name}"]
        try:
            yield
        finally:
            for index, found in enumerate(parameters):
                for name, parameter in found.items():
                    parameter.data = live[f"chunk{index}.{name}"]

    # scoring and training

    def score(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Collective over the job: log-probability and entropy at every response token as sampled, no gradient.

        Args:
            batch: This data-parallel index's sequences, the same on its tp and pp ranks; maybe none.

        Returns:
            logprobs_R and entropy_R, fp32 on the CPU, in the batch's order, the same on all those ranks.
        """
        return self._score(batch)

    def proximal(self, batch: RolloutBatch) -> Tensor:
        """Collective over the job: log-probability of every response token by the weights that sampled, as `score`.

        With `actor.router_replay=recompute` the batch gets `routed_experts_P`: where its tokens went in this pass.
        """
        if self._config.router_replay != "recompute" or self._arch.moe is None:
            return self._score(batch)[0]
        layers = stage_layers(self._arch, self._groups.grid)[self._groups.coords.pp]
        moe = self._arch.moe
        choices = Choices(self._groups, num_layers=len(layers), top_k=moe.top_k, dtype=choice_dtype(moe.num_experts))
        batch.routed_experts_P = None
        return self._score(batch, choices)[0]

    def _score(self, batch: RolloutBatch, choices: Choices | None = None) -> tuple[Tensor, Tensor]:
        self.bring("weights")
        microbatches = self._schedule.microbatches(batch, self._sampled)
        with torch.no_grad():
            reports = self._schedule.run(microbatches, _no_loss, backward=False, choices=choices)
        if choices is not None:
            batch.routed_experts_P = choices.in_order(batch, [(micro.rows, micro.row_I) for micro in microbatches])
        scored = torch.zeros(2, batch.response_mask_R.numel())
        if self._is_last_stage:
            scored = _in_batch_order(batch, microbatches, reports)
        self._from_last_stage(scored)
        return scored[0], scored[1]

    def start_optimizer(self, learning_rate: LearningRate) -> None:
        """Collective over the job: a fresh optimizer for the weights as they are, and its schedule."""
        self.bring(*PARTS)
        bf16 = self._dtype == torch.bfloat16
        check_te("optimizer", self._megatron.optimizer, te=self._te)
        self.optimizer = build_optimizer(
            self._replicas.chunks, self._config, bf16=bf16, dtype=self._dtype, given=self._megatron.optimizer
        )
        self._learning_rate = learning_rate
        self.num_updates = 0

    def follow(self, learning_rate: LearningRate) -> None:
        """Another schedule for the optimizer as it is."""
        self._learning_rate = learning_rate

    def update(self, minibatch: RolloutBatch, algorithm: Algorithm, *, on_policy: bool = False) -> dict[str, float]:
        """Collective over the job: one optimizer step on a minibatch.

        Args:
            minibatch: This data-parallel index's part, `weights_R` set; maybe none.
            algorithm: Its `loss` is minimised. A supervised one sees the model's own distribution: temperature 1, the
                whole vocabulary; any other that of `rollout`, from which was sampled.
            on_policy: The weights are still those that sampled: also report how engine and actor differ.

        Returns:
            The algorithm's metrics over the global minibatch, actor/grad_norm (before clipping), actor/lr, and of a
            mixture of experts `LoadBalance.metrics`, the same on all ranks.

        Raises:
            UserError: The gradient is not finite.
        """
        if self.optimizer is None or self._learning_rate is None:
            raise RuntimeError("start_optimizer comes before update")
        if self._schedule.replay and not algorithm.supervised:
            required(minibatch.routed_experts_P, "routed_experts_P")
        self._offload.bring(*PARTS)  # weights that an update left in parts are gathered as the forward comes to them
        rate = self._learning_rate.at(self.num_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            group["weight_decay"] = self._config.weight_decay * group.get("wd_mult", 1.0)
        self._replicas.zero_gradients()
        distribution = self._whole if algorithm.supervised else self._sampled
        microbatches = self._schedule.microbatches(minibatch, distribution)
        if self._balance is not None:
            self._balance.start([micro.packed.routing for micro in microbatches], self._groups.dp_cp)
        reports = self._schedule.run(microbatches, algorithm.loss, backward=True)
        metrics = self._reduced(minibatch, microbatches, reports, on_policy)
        if self._balance is not None:
            metrics |= self._balance.metrics()
        _, grad_norm, _ = self.optimizer.step()
        self.optimizer.zero_grad()  # fp32 copies of gradients, where the buffer is of another type
        self._replicas.updated()
        self.num_updates += 1
        if not torch.isfinite(torch.tensor(float(grad_norm))):
            error = UserError(
                f"the gradient norm is {grad_norm} at optimizer step {self.num_updates}, with loss "
                f"{metrics.get('actor/loss')}. The last checkpoint is not affected; lower actor.lr or look at the "
                "rewards."
            )
            error.everywhere = True
            raise error
        return metrics | {"actor/grad_norm": float(grad_norm), "actor/lr": rate}

    def _reduced(
        self,
        minibatch: RolloutBatch,
        microbatches: list[Microbatch],
        reports: list[dict[str, Tensor]],
        on_policy: bool,
    ) -> dict[str, float]:
        """Collective over the actor's replicas: reports summed over microbatches and data-parallel ranks."""
        found: dict[str, float] | None = None
        if self._is_last_stage:
            names = [name for name in reports[0] if not name.endswith("_R")]
            metrics = {name: torch.stack([report[name].double() for report in reports]) for name in names}
            reduced = {name: self._over_dp(name, values) for name, values in metrics.items()}
            if on_policy:
                logprobs_R = _in_batch_order(minibatch, microbatches, reports)[0]
                sums, largest = mismatch_sums(minibatch.rollout_logprobs_R, logprobs_R, minibatch.response_mask_R)
                dist.all_reduce(sums, group=self._groups.dp)
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._groups.dp)
                reduced |= mismatch_metrics(sums, largest)
            found = reduced
        told: dict[str, float] = from_rank(self._last_stage_rank, found, self._groups.pp)
        return told

    def _over_dp(self, name: str, values: Tensor) -> float:
        """Collective over data-parallel: the sum, or the extreme where the name ends in max or min."""
        if name.endswith("max"):
            value, operation = values.max(), dist.ReduceOp.MAX
        elif name.endswith("min"):
            value, operation = values.min(), dist.ReduceOp.MIN
        else:
            value, operation = values.sum(), dist.ReduceOp.SUM
        value = value.cpu()
        dist.all_reduce(value, op=operation, group=self._groups.dp)
        return float(value)

    @property
    def _last_stage_rank(self) -> int:
        return self._groups.grid.rank(replace(self._groups.coords, pp=self._groups.grid.pp - 1))

    @property
    def _is_last_stage(self) -> bool:
        return self._groups.rank == self._last_stage_rank

    def _from_last_stage(self, tensor: Tensor) -> None:
        """Collective over the pipeline: every stage gets the last one's values, in place."""
        if self._groups.grid.pp > 1:
            dist.broadcast(tensor, src=self._last_stage_rank, group=self._groups.pp)


def _sampled_distribution(config: Config) -> Distribution:
    """The sampling contract: the trainer scores what the engine sampled from."""
    rollout = config.rollout

    def threshold(logits_NV: Tensor) -> Tensor:
        cut_N = keep_threshold(logits_NV, rollout.top_k, rollout.top_p, rollout.min_p)
        return torch.full_like(logits_NV[:, 0], -torch.inf) if cut_N is None else cut_N  # top_k of at least V

    cuts = rollout.top_k != -1 or rollout.top_p < 1 or rollout.min_p > 0
    return Distribution(rollout.temperature, threshold if cuts else None, config.actor.logprob_chunk_tokens)


def _no_loss(logprobs_R: Tensor, entropy_R: Tensor, microbatch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return logprobs_R.new_zeros(()), {}


def _in_batch_order(batch: RolloutBatch, microbatches: list[Microbatch], reports: list[dict[str, Tensor]]) -> Tensor:
    """Log-probabilities and entropy [2, R] of a batch from those of its microbatches, on the CPU."""
    scored = torch.zeros(2, batch.response_mask_R.numel())
    starts = (batch.response_lens_B.cumsum(0) - batch.response_lens_B).tolist()
    lens = batch.response_lens_B.tolist()
    for micro, report in zip(microbatches, reports, strict=True):
        if micro.rows:
            index = torch.cat([torch.arange(starts[row], starts[row] + lens[row]) for row in micro.rows])
            scored[:, index] = torch.stack([report["logprobs_R"], report["entropy_R"]]).cpu()
    return scored


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name], non_blocking=True)
    torch.cuda.synchronize()
