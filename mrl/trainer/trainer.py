"""Construction of a run: builds the models, the rollout engine and everything else that the loop in `train.py` uses.

`startup.open_trainer` constructs a `Trainer` after the process groups exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from mrl.distributed.collectives import all_reduce_sum, broadcast_from_rank_0, broadcast_object, world_group
from mrl.distributed.groups import ProcessGroups
from mrl.distributed.launch import get_env
from mrl.distributed.watchdog.graceful_stop import Stop
from mrl.megatron.actor import Actor
from mrl.observability import data_sources
from mrl.observability import metrics as measure
from mrl.observability.off_policy import staleness_metrics
from mrl.observability.run_log import sample_rows
from mrl.rewards.scorer import Scorer, part_weights
from mrl.rollout.async_schedule import RolloutSchedule
from mrl.rollout.buffer import RolloutBuffer
from mrl.rollout.episodes.episodes import Episodes
from mrl.rollout.prompt_assignment import LengthHistory
from mrl.trainer.actor_weights import ActorWeights
from mrl.trainer.callbacks import RunCallbacks, TrainResult
from mrl.trainer.checkpointing import Checkpointing
from mrl.trainer.critic import RunCritic
from mrl.trainer.early_stopping import EarlyStopping
from mrl.trainer.learning_rate import learning_rate
from mrl.trainer.preemption import RunProgress
from mrl.trainer.rank_roles import broadcast_from_sampler, on_trainers
from mrl.trainer.reference import Reference
from mrl.trainer.reward_model import RunRewardModel
from mrl.trainer.rollout_worker import RolloutWorker
from mrl.trainer.run_context import RunContext
from mrl.trainer.run_length import is_over
from mrl.trainer.run_plan import RunPlan
from mrl.trainer.teachers import RunTeachers
from mrl.trainer.throughput import Rates
from mrl.trainer.training_state import TrainingState
from mrl.trainer.validation.megatron import forced
from mrl.types import Rollout, SampleTable

T = TypeVar("T")


class Trainer:
    """All parts of a run on this rank; constructed by `open_trainer`.

    Args:
        plan: Resolved and validated config.
        context: Process groups, device, log, timers and checkpoint folders.
        trains: False for an evaluation, which needs neither critic nor teachers.

    Attributes:
        weights: Reader and writer of the actor's weights as Hugging Face folders.
        critic: Critic on ranks that train; None if the algorithm has none.
        teachers: Distillation teachers on ranks that train; None without distillation.
        reward_model: Reward model; None if the config has none.
        rollout_worker: Rollout engine and weight sync.
        reward_weights: Weight of each reward function, by its name in `Rollout.reward_parts`.
        scorer: Reward functions for this replica's samples, on the first rank of each replica; None elsewhere.
        episodes: Multi-turn episodes; None for single-turn samples and on ranks that do not sample.
        state: Training state besides model weights and optimizers.
        progress: Position in the run and handling of stop requests.
        callbacks: Callbacks of `observe.callbacks`.
        checkpointing: Writer and reader of checkpoints.
        rates: Throughput metrics.
    """

    def __init__(self, plan: RunPlan, context: RunContext, *, trains: bool) -> None:
        """Collective over the job: builds all parts."""
        config, groups, device, log = plan.config, context.groups, context.device, context.log
        self.config, self.arch, self.tokenizer, self.algorithm = config, plan.arch, plan.tokenizer, plan.algorithm
        self.groups, self.device, self.log, self.timers = groups, device, log, context.timers
        self.validation, self.run, self.tools = plan.validation, plan.run, plan.tools
        for warning in [*forced(config, plan.arch, plan.grid), *plan.warnings]:
            log.note(f"WARNING {warning}")
        models: tuple[Actor | None, RunCritic | None, RunTeachers | None] = (None, None, None)
        with on_trainers(groups) as here:
            if here:
                models = self._models(plan, trains=trains)
        self._actor, self.critic, self.teachers = models
        self.weights = ActorWeights(plan, self._actor, groups)
        self.reward_model = RunRewardModel.of(plan, groups, device, self._actor)
        self.state = TrainingState(
            plan.source,
            LengthHistory(config.rollout.response_length),
            self._reference(plan),
            plan.algorithm.kl_control,
            plan.algorithm.entropy_control,
            RolloutBuffer(RolloutSchedule.of(config), plan.source.at),
            EarlyStopping(config.train.early_stopping, config.train.critic_warmup),
        )
        self.progress = RunProgress(self.timers, self.state.snapshot, self.state.snapshot_buffer)
        # Episodes cannot be continued later, so they are not cut when only the time for the step runs out.
        multi_turn = config.rollout.multi_turn.enable
        stops = self.progress.abort_requested if multi_turn else self.progress.must_stop_sampling
        self.rollout_worker = RolloutWorker(plan, context, self._actor, self.weights, stops)
        self.scorer = _scorer(plan, groups, keeps=trains) if groups.is_replica_leader else None
        self.reward_weights = part_weights(config.reward)
        self.episodes = self._episodes(plan)
        self.callbacks = RunCallbacks(config, groups.rank if trains else -1)
        self.checkpointing = Checkpointing(
            config.checkpoint,
            context.checkpoints,
            context.resume_point,
            groups=groups,
            actor=self._actor,
            critic=None if self.critic is None else self.critic.model,
            weights=self.weights,
            state=self.state,
            progress=self.progress,
            timers=self.timers,
            log=log,
            on_written=self.callbacks.checkpoint_written,
        )
        self.rates = Rates(plan, device, self.timers, self.rollout_worker.engine)

    def _models(self, plan: RunPlan, *, trains: bool) -> tuple[Actor, RunCritic | None, RunTeachers | None]:
        """Collective over the ranks that train: builds the actor and, except for evaluation, critic and teachers."""
        actor = Actor(self.config, plan.arch, self.groups, self.device)
        actor.offload()  # before the engine measures the free memory
        critic = teachers = None
        if plan.critic is not None and trains:
            critic = RunCritic(plan, plan.critic, self.groups, self.device, actor)
        if plan.teachers and trains:
            teachers = RunTeachers(plan, self.groups, self.device, actor)
        return actor, critic, teachers

    def _reference(self, plan: RunPlan) -> Reference:
        config = plan.config
        initial = config.actor.lora.adapter_path or config.model.path
        return Reference(
            config.reference,
            plan.run.checkpoints,
            needed=plan.algorithm.needs_reference,
            initial=None if config.train.warm_start.num_steps else initial,
            load=self.weights.load_reference,
            take=self.weights.copy_to_reference,
            export=self.weights.export_trained,
        )

    @property
    def actor(self) -> Actor:
        """Actor of this rank.

        Raises:
            RuntimeError: This rank only samples.
        """
        if self._actor is None:
            raise RuntimeError(f"rank {self.groups.rank} only samples and has no actor")
        return self._actor

    def _episodes(self, plan: RunPlan) -> Episodes | None:
        if not (self.config.rollout.multi_turn.enable and self.groups.is_sampler):
            return None
        stop = self.progress.abort_requested
        return Episodes(self.config.rollout, plan.tokenizer, plan.tools, self.groups.rollout_tp, abort_requested=stop)

    def close(self) -> None:
        """Ends worker processes, discards an unfinished checkpoint and frees the engine."""
        self.checkpointing.close()
        if self.scorer is not None:
            self.scorer.close()
        if self.episodes is not None:
            self.episodes.close()
        self.rollout_worker.engine.close()

    def resume(self) -> int | None:
        """Collective over the job: creates the optimizers, then loads the last checkpoint or the initial weights.

        Returns:
            Steps done, or None for a new run; see `Checkpointing.resume`.
        """
        with on_trainers(self.groups) as here:
            if here:
                self.actor.start_optimizer(learning_rate(self.config))
            if self.critic is not None:
                self.critic.start_optimizer()
                self.critic.load_base()
            if self.teachers is not None:
                self.teachers.load()
        return self.checkpointing.resume()

    def init_reference_and_critic(self, step: int) -> None:
        """Collective over the job: initializes reference and critic, from their own folders or the current actor.

        Args:
            step: Number of steps done.
        """
        self.state.reference.start(step)
        with on_trainers(self.groups):
            if self.critic is not None:
                self.critic.start()

    def run_on_trainers(self, work: Callable[[], T], *, may_stop: bool = False) -> T:
        """Collective over the job: runs `work` on the ranks that train; other ranks wait and return rank 0's result.

        Args:
            work: Function that returns plain data.
            may_stop: True if the step can still be abandoned afterwards; then all ranks check for a stop request.
        """
        if self.groups.trainers is None:
            return work()
        own: list[T] = []
        with self.progress.without_stop_checks(), on_trainers(self.groups) as here:
            if here:
                own.append(work())
        result = self._from_rank_0(own)
        if may_stop:
            self.progress.check_stop()
        return result

    def _from_rank_0(self, own: list[T]) -> T:
        """Collective over the job: returns this rank's result, or rank 0's where `own` is empty; syncs the version."""
        first, self.state.policy_version = broadcast_from_rank_0((own, self.state.policy_version))
        result: T = (own or first)[0]
        return result

    def take_batch(self, step: int) -> tuple[SampleTable, list[Rollout], dict[str, float]]:
        """Collective over the job: removes the samples that `step` trains on from the rollout buffer.

        Returns:
            Table of all samples, samples of this rank's replica, and metrics of the sampling.

        Raises:
            RuntimeError: A token is older than `train.max_off_policy_steps`.
        """
        buffer = self.state.buffer
        taken = buffer.take(step)
        tally, table = taken.tally, taken.table
        for note in tally.notes:
            self.log.note(note)
        metrics = {
            "rollout/num_sampling_rounds": float(tally.rounds),
            "rollout/num_dropped_groups": float(tally.dropped),
        }
        if tally.drawn is not None:
            self.state.history.update(tally.sources, tally.drawn)
            scored = tally.drawn.scored
            self.state.source.record_rewards(scored["uid"].long().tolist(), scored["reward"].tolist())
            metrics |= measure.scoring_metrics(tally.drawn) | measure.episode_metrics(tally.drawn)
        if self.teachers is not None:
            self.teachers.route([buffer.prompt(uid) for uid in taken.names])
        metrics |= data_sources.training_metrics(table, taken.names)
        if buffer.schedule.is_off_policy and len(table):
            metrics |= staleness_metrics(table, partial(buffer.age_of, step=step), num_carried=taken.num_carried)
            metrics["rollout/num_restarted_groups"] = float(tally.restarted)
            if not buffer.schedule.in_order:
                metrics |= buffer.acceptance.metrics(taken.carried)
            buffer.check_age(metrics["training/off_policy/trajectory_staleness_worst/max"])
        self.state.source.release(self.state.position)
        return table, taken.rollouts, metrics

    def train_while_sampling(self, train: Callable[[], T], sample: Callable[[dist.ProcessGroup], None]) -> T:
        """Collective over the job: runs `train` on the ranks that train, concurrently with `sample` on the others.

        Without separate sampling ranks, `sample` runs first and then `train`; the results are the same.

        Args:
            train: Function that returns plain data.
            sample: Function that is collective over the process group that it is called with.

        Returns:
            Result of `train`, on ranks that only sample that of rank 0.
        """
        samplers = self.groups.samplers
        if samplers is None:
            sample(world_group())
            self.rollout_worker.release_engine()
            return train()
        own: list[T] = []
        with self.progress.without_stop_checks(), on_trainers(self.groups) as here:
            if here:
                own.append(train())
            else:
                sample(samplers)
        result = self._from_rank_0(own)
        self._follow_samplers()
        return result

    def _follow_samplers(self) -> None:
        """Collective over the job: copies buffer metadata, data position and timings to ranks that only train."""
        buffer, source, first = self.state.buffer, self.state.source, self.groups.grid.samplers.start
        own = (buffer.state_dict(), *buffer.tables(), source.state_dict(), self.timers.metrics())
        state, columns, tables, position, timings = broadcast_object(first, own if self.groups.is_sampler else None)
        if not self.groups.is_sampler:
            buffer.load_state(state, columns, tables)
            source.load_state_dict(position)
            self.timers.heard(timings)

    def log_samples(self, step: int, rollouts: Sequence[Rollout], phase: str) -> None:
        """Collective over the job: logs the first `observe.num_samples` samples of the first replica."""
        rows = sample_rows(rollouts, phase=phase, num_samples=self.config.observe.num_samples)
        self.log.samples(step, broadcast_from_sampler(self.groups, rows))

    def result(self, stop: Stop | None) -> TrainResult:
        """Returns the result of the run, from the last recorded state and the source of stop requests."""
        state, saved = self.progress.last_state, self.run.committed_steps()
        step = 0 if state is None else state.state["step"]
        why = self.callbacks.stopped_by or ("early stopping" if self.stopped_early(step) else "")
        return TrainResult(
            self.run.root,
            step,
            {} if state is None else dict(state.metrics),
            self.checkpointing.checkpoints.path(saved[-1]) if saved else None,
            why or ("" if stop is None else stop.why),
        )

    def is_last(self, step: int) -> bool:
        """Returns whether the run ends after `step` steps; False if the next step is done but not logged yet."""
        over = self._has_all_steps(step) or self.state.early_stopping.why != ""
        return over and self.progress.unlogged(step + 1) is None

    def stopped_early(self, step: int) -> str:
        """Returns why `train.early_stopping` ended the run before its last step, a sentence; "" if it did not."""
        return "" if self._has_all_steps(step) else self.state.early_stopping.why

    def _has_all_steps(self, step: int) -> bool:
        num_rows = self.state.source.num_rows
        return is_over(self.config.train, step, position=self.state.position, num_rows=num_rows)

    def sync_weights_if_stale(self) -> dict[str, float]:
        """Collective over the job: syncs weights to the engine if it has older ones; returns the cost metrics."""
        return self.rollout_worker.sync_weights_if_stale(self.state.policy_version)

    def sum_over_dp(self, tensor: Tensor) -> Tensor:
        """Collective over data-parallel ranks: returns the elementwise sum, fp64."""
        return all_reduce_sum(tensor.double(), self.groups.dp)


def _scorer(plan: RunPlan, groups: ProcessGroups, *, keeps: bool) -> Scorer:
    """Builds the scorer of this replica; `keeps` stores scores in the run folder for a resume."""
    scores = plan.run.scores / f"replica{groups.grid.replica(groups.rank)}" if keeps else None
    tokenizer = plan.tokenizer
    texts = tokenizer.decode, tokenizer.eos_ids, tokenizer.special_ids
    return Scorer(plan.config.reward, *texts, get_env, scores)
