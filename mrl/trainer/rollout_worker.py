"""Rollout worker: the engine on this rank, its weight sync, and the sharing of the device with the actor.

If actor and engine are on the same ranks, the actor is offloaded while the engine generates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from torch import Tensor

from mrl.config.config import Config
from mrl.config.registry import find
from mrl.distributed.collectives import raise_on_all_ranks
from mrl.engines._capabilities import engine_capabilities
from mrl.engines._null_engine import NullEngine
from mrl.engines.base import EngineSpec, RolloutEngine, SamplingConfig
from mrl.megatron.actor import Actor
from mrl.resharding.dtypes import DTYPES, expert_index_dtype
from mrl.resharding.fp8 import block_grids
from mrl.resharding.layout import Layout
from mrl.resharding.megatron import stage_moe_layers
from mrl.resharding.merged_weights import ScaledAdapters
from mrl.resharding.weight_sync import AdapterSync, WeightSync
from mrl.rollout.dispatch import StageRoutingFormat
from mrl.rollout.sampling_params import training_sampling, validation_sampling
from mrl.rollout.sampling_progress import SamplingProgress
from mrl.trainer import weight_sync_check
from mrl.trainer.actor_weights import ActorWeights
from mrl.trainer.rank_roles import broadcast_from_sampler
from mrl.trainer.run_context import RunContext
from mrl.trainer.run_plan import RunPlan
from mrl.types import Prompt, Rollout


class RolloutWorker:
    """Rollout engine of this rank, which alternates on the device with the actor.

    Attributes:
        engine: Rollout engine; a placeholder on ranks that do not sample.
        weight_sync: Transfer of the actor's weights into the engine.
        train_sampling: Sampling distribution of training rollouts.
        val_sampling: Sampling distribution of held-out rollouts.
        progress: Progress of the current sampling phase, for the console.
        routing: Format of the engine's routing records; None without router replay.
    """

    def __init__(
        self,
        plan: RunPlan,
        context: RunContext,
        actor: Actor | None,
        weights: ActorWeights,
        abort_requested: Callable[[], bool],
    ) -> None:
        """Collective over the job: builds the engine.

        Args:
            plan: Resolved and validated config.
            context: Process groups, device and log.
            actor: Actor, already offloaded so that the engine measures the free memory; None on ranks that only
                sample.
            weights: Provider of a model folder without weights, from which engines read the model's structure.
            abort_requested: Returns whether this rank's engine must stop sampling.
        """
        config, rollout, groups = plan.config, plan.config.rollout, context.groups
        self._rollout, self._arch, self._actor = rollout, plan.arch, actor
        self._groups, self._device, self._log = groups, context.device, context.log
        self.progress = SamplingProgress(context.log.progress)
        # with separate rollout ranks no actor needs the engine's memory
        self._frees = rollout.free_cache_engine and not groups.grid.has_separate_rollout
        self._lora = config.actor.lora if config.actor.lora.rank and not config.actor.lora.merge else None
        self.engine = self._start_engine(plan, weights, context.on_forward, abort_requested)
        for note in broadcast_from_sampler(groups, self.engine.notes):
            self._log.note(note)
        try:
            if self._frees:  # before the actor's weights return to the device
                self.engine.sleep()
                self.release_engine()
            self.weight_sync = self._weight_sync(config)
        except Exception:
            self.engine.close()
            raise
        self._self_test_is_due = weight_sync_check.is_wanted(rollout)
        self.train_sampling = training_sampling(config, plan.tokenizer.eos_ids)
        self.val_sampling = validation_sampling(config, plan.tokenizer.eos_ids)
        self.routing: StageRoutingFormat | None = None
        moe = plan.arch.moe
        if rollout.enable_rollout_routing_replay and moe is not None:
            numbers = {layer: number for number, layer in enumerate(plan.arch.moe_layers)}
            layers = [[numbers[layer] for layer in stage] for stage in stage_moe_layers(plan.arch, groups.grid)]
            index_dtype = expert_index_dtype(moe.num_experts)
            self.routing = StageRoutingFormat(len(numbers), moe.top_k, index_dtype, layers)

    def _weight_sync(self, config: Config) -> WeightSync | AdapterSync:
        """Collective over the job: plans the copies of the actor's weights and adapters to the engine."""
        actor, engine, rollout = self._actor, self.engine, config.rollout
        grids = block_grids(self._arch, rollout.quantization)
        if self._lora is None:
            merged = ({}, {}) if actor is None else (actor.layout(), actor.merged_tensors())
            return WeightSync(*merged, engine, rollout.checkpoint_engine, grids)
        own = ({}, {}) if actor is None else (actor.layout(), actor.named_tensors())
        weights = WeightSync(*own, engine, rollout.checkpoint_engine, grids)
        adapters = None if actor is None else actor.adapters
        trained: tuple[Layout, Mapping[str, Tensor]] = {}, {}
        if actor is not None and adapters is not None:
            trained = adapters.layout(), actor.trained_tensors()
            if engine_capabilities(rollout.name).scales_lora_b:
                trained = adapters.layout(), ScaledAdapters(trained[1], adapters.matrices, adapters.scale)
        return AdapterSync(weights, WeightSync(*trained, engine.adapters or engine, rollout.checkpoint_engine), engine)

    def _start_engine(
        self,
        plan: RunPlan,
        weights: ActorWeights,
        on_forward: Callable[[], object],
        abort_requested: Callable[[], bool],
    ) -> RolloutEngine:
        config, rollout, groups = plan.config, plan.config.rollout, self._groups
        engine = find("engines", rollout.name, "ENGINE") if plan.needs_engine else NullEngine
        spec = EngineSpec(
            config=replace(rollout, free_cache_engine=self._frees),
            arch=plan.arch,
            tp_group=groups.rollout_tp,
            device=self._device,
            dtype=DTYPES[rollout.dtype or config.model.dtype],
            decode=plan.tokenizer.decode,
            write_model_folder=weights.model_folder,
            timeout_s=config.run.collective_timeout_s,
            trains_on_logprobs=config.algorithm.rollout_correction.uses_rollout_logprobs,
            abort_requested=abort_requested,
            on_forward=on_forward,
            on_sampled=self.progress.record,
            lora=self._lora,
        )
        # without separate rollout ranks the start itself is collective
        with raise_on_all_ranks() if groups.grid.has_separate_rollout else nullcontext():
            if not groups.is_sampler:
                engine.start_without_engine()
            return (engine if groups.is_sampler else NullEngine)(spec)

    @contextmanager
    def awake(self) -> Iterator[RolloutEngine]:
        """Offloads the actor and wakes the engine; at the end `rollout.free_cache_engine` frees the KV cache."""
        if self._actor is not None:
            self._actor.offload()
        self.engine.wake()
        yield self.engine
        if self._frees:
            self.engine.sleep()

    def release_engine(self) -> None:
        """Frees the engine's weights too before an update, with `rollout.free_cache_engine`.

        An engine with low-rank adapters keeps them, as they are synced only once.
        """
        if self._frees and self._lora is None:
            self.engine.release()

    def sync_weights_if_stale(self, policy_version: int) -> dict[str, float]:
        """Collective over the job: copies the actor's weights into the engine if the engine has an older version.

        After an evaluation the engine already has them. The transferred bytes are returned in either case, so that a
        resumed run logs the same metrics.

        Args:
            policy_version: Version of the actor's weights.

        Returns:
            Cost metrics of a weight sync.
        """
        if self.engine.policy_version == policy_version:
            return self.weight_sync.cost()
        cost = self._refit(policy_version)
        if self._self_test_is_due:
            self._self_test_is_due = False
            if self._lora is not None:
                weight_sync_check.check_adapters(
                    self.engine.adapters, self._generate, self._arch, self._rollout, policy_version
                )
                self._refit(policy_version)
            moved = weight_sync_check.check(
                partial(self._refit, policy_version), self._generate, self._arch, self._rollout, self._device
            )
            result = broadcast_from_sampler(self._groups, None if moved is None else str(moved))
            if result is not None:
                what = "weights" if self._lora is None else "adapters"
                self._log.note(f"weight-sync self-test: same {what} synced twice: {result}")
        return cost

    def _refit(self, policy_version: int) -> dict[str, float]:
        if self._actor is not None:
            self._actor.offload(keep=["weights"])
            self._actor.onload("weights")
        return self.weight_sync(policy_version)

    def _generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        with self.awake() as engine:
            return engine.generate(prompts, sampling)
