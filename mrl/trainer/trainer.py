"""A run put together: config in, everything that the loop needs out.

Owns which parts there are and the order in which they are built; each is a file beside this one. `startup.py` makes a
job; the loop itself is in `train.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.checkpoint.run_dir.checkpoint import Checkpoints, Found
from mrl.distributed.collectives import everyone, from_first_rank, from_rank, sum_over
from mrl.distributed.groups import ProcessGroups
from mrl.distributed.launch import variables
from mrl.megatron.actor import Policy
from mrl.observability import data_sources
from mrl.observability import metrics as measure
from mrl.observability.off_policy import staleness_metrics
from mrl.observability.run_log import RunLog, sample_rows
from mrl.observability.timers import Timers
from mrl.rewards.scorer import Scorer, part_weights
from mrl.rollout.async_schedule import Schedule
from mrl.rollout.buffer import InFlight
from mrl.rollout.episodes.episodes import Episodes
from mrl.rollout.prompt_assignment import LengthHistory
from mrl.trainer.actor_weights import ActorWeights
from mrl.trainer.checkpointing import Commits
from mrl.trainer.critic import RunCritic
from mrl.trainer.learning_rate import learning_rate
from mrl.trainer.num_steps import is_over
from mrl.trainer.preemption import Progress
from mrl.trainer.rank_roles import of_samplers, on_trainers
from mrl.trainer.reference import Reference
from mrl.trainer.resolve import Plan
from mrl.trainer.reward_model import RunRewardModel
from mrl.trainer.rollout_worker import Sampler
from mrl.trainer.teachers import RunTeachers
from mrl.trainer.throughput import Rates
from mrl.trainer.training_state import TrainingState
from mrl.trainer.validation.megatron import forced
from mrl.types import Rollout, SampleTable

T = TypeVar("T")


class Job:
    """A job that has come up: ranks, actor, engine, and everything around them. `open_job` makes it.

    Attributes:
        weights: The actor's, from and to Hugging Face folders.
        critic: Of an algorithm that has one, on ranks that train.
        teachers: Of a run with distillation, on ranks that train.
        reward_model: Scores samples; None: the run has none.
        sampler: The engine and its refits.
        reward_weights: Factor of each reward function, by its name in `Rollout.reward_parts`.
        scorer: Scores this replica's rollouts; None on ranks that do not lead one.
        episodes: Conversations with environments; None: a sample is one answer, or this rank does not sample.
        state: What the loop moves on beside the weights.
        progress: The steps and phases that can be abandoned.
        commits: Written and taken up again.
        rates: How fast a step was.
    """

    def __init__(
        self,
        plan: Plan,
        groups: ProcessGroups,
        device: torch.device,
        log: RunLog,
        checkpoints: Checkpoints,
        found: Found | None,
        *,
        trains: bool,
    ) -> None:
        """Collective over the job; of `open_job`."""
        config, tokenizer = plan.config, plan.tokenizer
        self.config, self.arch, self.tokenizer, self.algorithm = config, plan.arch, tokenizer, plan.algorithm
        self.validation, self.run, self.groups, self.device, self.log = plan.validation, plan.run, groups, device, log
        self.tools = plan.tools
        for warning in [*forced(config, plan.arch, plan.grid), *plan.warnings]:
            log.note(f"WARNING {warning}")
        models: tuple[Policy | None, RunCritic | None, RunTeachers | None] = (None, None, None)
        with on_trainers(groups) as here:
            if here:
                models = self._models(plan, trains=trains)
        self._policy, self.critic, self.teachers = models
        self.weights = ActorWeights(plan, self._policy, groups)
        self.reward_model = RunRewardModel.of(plan, groups, device, self._policy)
        self.sampler = Sampler(plan, groups, device, self._policy, self.weights, log.note)
        self.scorer = _scorer(plan, groups, keeps=trains) if groups.leads_replica else None
        self.reward_weights, self.timers = part_weights(config.reward), Timers(device, log.phase)
        self.state = TrainingState(
            plan.source,
            LengthHistory(config.rollout.response_length),
            self._reference(plan),
            plan.algorithm.kl_control,
            plan.algorithm.entropy_control,
            InFlight(Schedule.of(config), plan.source.at),
        )
        self.progress = Progress(self.timers, self.state.snapshot, self.state.kept_samples)
        self.episodes = self._episodes(plan)
        whole = self.progress.told_to_stop  # no part of a conversation is kept
        self.sampler.engine.told_to_stop = self.progress.ends_sampling if self.episodes is None else whole
        self.commits = Commits(
            config.checkpoint,
            checkpoints,
            found,
            groups=groups,
            policy=self._policy,
            critic=None if self.critic is None else self.critic.model,
            weights=self.weights,
            state=self.state,
            progress=self.progress,
            timers=self.timers,
            log=log,
        )
        self.rates = Rates(plan, device, self.timers, self.sampler.engine)

    def _models(self, plan: Plan, *, trains: bool) -> tuple[Policy, RunCritic | None, RunTeachers | None]:
        """Collective over the ranks that train: what is on them; an evaluation needs only the actor."""
        policy = Policy(self.config, plan.arch, self.groups, self.device)
        policy.offload()  # before the engine reads how much memory is free
        critic = teachers = None
        if plan.critic is not None and trains:
            critic = RunCritic(plan, plan.critic, self.groups, self.device, policy)
        if plan.teachers and trains:
            teachers = RunTeachers(plan, self.groups, self.device, policy)
        return policy, critic, teachers

    def _reference(self, plan: Plan) -> Reference:
        config = plan.config
        return Reference(
            config.reference,
            plan.run.checkpoints,
            needed=plan.algorithm.needs_reference,
            initial=None if config.train.warm_start.num_steps else config.model.path,
            load=self.weights.load_reference,
            take=self.weights.take_reference,
            export=self.weights.export,
        )

    @property
    def policy(self) -> Policy:
        """The actor.

        Raises:
            RuntimeError: This rank has none: it only samples.
        """
        if self._policy is None:
            raise RuntimeError(f"rank {self.groups.rank} only samples: it has no actor")
        return self._policy

    def _episodes(self, plan: Plan) -> Episodes | None:
        if not (self.config.rollout.multi_turn.enable and self.groups.samples):
            return None
        stop = self.progress.told_to_stop
        return Episodes(self.config.rollout, plan.tokenizer, plan.tools, self.groups.rollout_tp, told_to_stop=stop)

    def close(self) -> None:
        """Ends worker processes, drops a commit that is not written yet, and frees the engine."""
        self.commits.close()
        if self.scorer is not None:
            self.scorer.close()
        if self.episodes is not None:
            self.episodes.close()
        self.sampler.engine.close()

    def resume(self) -> int | None:
        """Collective over the job: see `Commits.resume`; the optimizer is there for either."""
        with on_trainers(self.groups) as here:
            if here:
                self.policy.start_optimizer(learning_rate(self.config))
            if self.critic is not None:
                self.critic.start_optimizer()
            if self.teachers is not None:
                self.teachers.load()
        return self.commits.resume()

    def begin(self, step: int) -> None:
        """Collective over the job: reference and critic get their first weights, maybe those of the actor of now.

        Args:
            step: Steps done.
        """
        self.state.reference.start(step)
        with on_trainers(self.groups):
            if self.critic is not None:
                self.critic.start()

    def on_trainers(self, work: Callable[[], T], *, may_stop: bool = False) -> T:
        """Collective over the job: what the ranks that train make of it; the others wait for what rank 0 made.

        Args:
            work: Gives plain data.
            may_stop: The step can still be abandoned: where the others wait, all ranks ask at the end.
        """
        if self.groups.trainers is None:
            return work()
        found: list[T] = []
        with self.progress.apart(), on_trainers(self.groups) as here:
            if here:
                found.append(work())
        told, self.state.policy_version = from_first_rank((found, self.state.policy_version))
        if may_stop:
            self.progress.ask()
        made: T = (found or told)[0]
        return made

    def take(self, step: int) -> tuple[SampleTable, list[Rollout], dict[str, float]]:
        """Collective over the job: what a step trains on, this rank's samples of it, and how they came about.

        Raises:
            RuntimeError: A token is older than `train.max_off_policy_steps`.
        """
        flight = self.state.in_flight
        taken = flight.take(step)
        tally, table = taken.tally, taken.table
        for note in tally.notes:
            self.log.note(note)
        metrics = {
            "rollout/num_sampling_rounds": float(tally.rounds),
            "rollout/num_dropped_groups": float(tally.dropped),
        }
        if tally.drawn is not None:
            self.state.history.update(tally.sources, tally.drawn)
            metrics |= measure.scoring_metrics(tally.drawn) | measure.episode_metrics(tally.drawn)
        if self.teachers is not None:
            self.teachers.route([flight.prompt(uid) for uid in taken.names])
        metrics |= data_sources.training_metrics(table, taken.names)
        if flight.schedule.is_off_policy and len(table):
            metrics |= staleness_metrics(table, partial(flight.age_of, step=step), num_carried=taken.num_carried)
            metrics["rollout/num_restarted_groups"] = float(tally.restarted)
            if not flight.schedule.in_order:
                metrics |= flight.acceptance.metrics(taken.carried)
            flight.check_age(metrics["training/off_policy/trajectory_staleness_worst/max"])
        return table, taken.rollouts, metrics

    def beside(self, train: Callable[[], T], sample: Callable[[dist.ProcessGroup], None]) -> T:
        """Collective over the job: what the ranks that train make, while those that sample do that.

        Ranks that do both sample first. What the others do changes nothing but the time.

        Args:
            train: Gives plain data.
            sample: Collective over the group that it is given.
        """
        samplers = self.groups.samplers
        if samplers is None:
            sample(everyone())
            self.sampler.rest()
            return train()
        found: list[T] = []
        with self.progress.apart(), on_trainers(self.groups) as here:
            if here:
                found.append(train())
            else:
                sample(samplers)
        told, self.state.policy_version = from_first_rank((found, self.state.policy_version))
        self._follow_samplers()
        made: T = (found or told)[0]
        return made

    def _follow_samplers(self) -> None:
        """Collective over the job: those that train know what was sampled, and how long it took."""
        flight, source, first = self.state.in_flight, self.state.source, self.groups.grid.samplers.start
        mine = (flight.state_dict(), *flight.tables(), source.state_dict(), self.timers.metrics())
        state, columns, tables, frontier, timings = from_rank(first, mine if self.groups.samples else None)
        if not self.groups.samples:
            flight.follow(state, columns, tables)
            source.load_state_dict(frontier)
            self.timers.heard(timings)

    def show(self, step: int, rollouts: Sequence[Rollout], phase: str) -> None:
        """Collective over the job: logs the first samples of the first replica."""
        rows = sample_rows(rollouts, phase=phase, num_samples=self.config.observe.num_samples)
        self.log.samples(step, of_samplers(self.groups, rows))

    def is_last(self, step: int) -> bool:
        """Whether the run ends after so many steps; not if the next one is done and has no line in the log yet."""
        source = self.state.source
        over = is_over(self.config.train, step, position=self.state.position, num_rows=source.num_rows)
        return over and self.progress.unlogged(step + 1) is None

    def refit_if_stale(self) -> dict[str, float]:
        """Collective over the job: see `Sampler.refit_if_stale`."""
        return self.sampler.refit_if_stale(self.state.policy_version)

    def sum_over_dp(self, tensor: Tensor) -> Tensor:
        """Collective over data-parallel: elementwise sum, fp64."""
        return sum_over(tensor.double(), self.groups.dp)


def _scorer(plan: Plan, groups: ProcessGroups, *, keeps: bool) -> Scorer:
    """Of this replica; `keeps` its scores in the run folder."""
    scores = plan.run.scores / f"replica{groups.grid.replica(groups.rank)}" if keeps else None
    tokenizer = plan.tokenizer
    texts = tokenizer.decode, tokenizer.eos_ids, tokenizer.special_ids
    return Scorer(plan.config.reward, *texts, variables, scores)
