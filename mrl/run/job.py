"""A run put together: config in, everything that the loop needs out.

Owns which parts there are and the order in which they are built; each is a file beside this one. `opening.py` makes a
job; the loop itself is in `train.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.data.steps import is_over
from mrl.distributed.collectives import sum_over
from mrl.distributed.groups import ProcessGroups
from mrl.distributed.launch import variables
from mrl.episodes.episodes import Episodes
from mrl.megatron.policy import Policy
from mrl.observe.run_log import RunLog
from mrl.observe.timers import Timers
from mrl.preflight.megatron import forced
from mrl.rewards.scorer import Scorer, part_weights
from mrl.rollout.replicas import LengthHistory
from mrl.run.actor_weights import ActorWeights
from mrl.run.commits import Commits
from mrl.run.critic import RunCritic
from mrl.run.learning_rate import learning_rate
from mrl.run.prepare import Plan
from mrl.run.progress import Progress
from mrl.run.rates import Rates
from mrl.run.reference import Reference
from mrl.run.sampler import Sampler
from mrl.run.teachers import RunTeachers
from mrl.run.training_state import TrainingState
from mrl.run_folder.checkpoint import Checkpoints, Found


class Job:
    """A job that has come up: ranks, actor, engine, and everything around them. `open_job` makes it.

    Attributes:
        policy: The actor.
        weights: The actor's, from and to Hugging Face folders.
        critic: Of an algorithm that has one.
        teachers: Of a run with distillation.
        sampler: The engine and its refits.
        reward_weights: Factor of each reward function, by its name in `Rollout.reward_parts`.
        scorer: Scores this replica's rollouts; None on ranks that do not lead one.
        episodes: Conversations with environments; None: a sample is one answer.
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
        for warning in forced(config, plan.arch, plan.grid):
            log.note(f"WARNING {warning}")
        self.policy = Policy(config, plan.arch, groups, device)
        self.policy.offload()  # before the engine reads how much memory is free
        self.weights = ActorWeights(plan, self.policy, groups.rank)
        self.critic = self.teachers = None  # an evaluation needs none
        if plan.critic is not None and trains:
            self.critic = RunCritic(plan, plan.critic, groups, device, self.policy)
        if plan.teachers and trains:
            self.teachers = RunTeachers(plan, groups, device, self.policy)
        self.sampler = Sampler(plan, groups, device, self.policy, self.weights, log.note)
        self.scorer = _scorer(plan, groups, keeps=trains) if groups.leads_replica else None
        self.reward_weights, self.timers = part_weights(config.reward), Timers(device, log.phase)
        self.state = TrainingState(
            plan.source,
            LengthHistory(config.rollout.response_length),
            Reference(
                config.reference,
                plan.run.checkpoints,
                needed=plan.algorithm.needs_reference,
                initial=None if config.train.warm_start.num_steps else config.model.path,
                load=self.weights.load_reference,
                take=self.weights.take_reference,
                export=self.weights.export,
            ),
            plan.algorithm.kl_control,
            plan.algorithm.entropy_control,
        )
        self.progress = Progress(self.timers, self.state.snapshot)
        self.sampler.engine.told_to_stop = self.progress.told_to_stop
        self.episodes = self._episodes(plan)
        self.commits = Commits(
            config.checkpoint,
            checkpoints,
            found,
            policy=self.policy,
            critic=None if self.critic is None else self.critic.model,
            weights=self.weights,
            state=self.state,
            progress=self.progress,
            timers=self.timers,
            log=log,
        )
        self.rates = Rates(plan, device, self.timers, self.sampler.engine)

    def _episodes(self, plan: Plan) -> Episodes | None:
        if not self.config.rollout.multi_turn.enable:
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
        if self.critic is not None:
            self.critic.start()

    def is_last(self, step: int) -> bool:
        """Whether the run ends after so many steps; not if the next one is done and has no line in the log yet."""
        source = self.state.source
        over = is_over(self.config.train, step, position=source.position, num_rows=source.num_rows)
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
