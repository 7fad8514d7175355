"""The loop. Reads in the order in which it runs; start here.

    refit -> rollout -> reward -> pack -> log-probabilities -> advantages -> update -> evaluate -> log -> commit

Owns the order of the phases and nothing else: `trainer/trainer.py` puts a run together, `rollout/` moves samples
between ranks, `algorithms/` knows advantages and losses, `megatron/actor.py` the actor, `engines/` the sampling,
`observability/` every metric. All ranks call every function here together, but for what is handed to `Job.on_trainers`:
where rollouts have ranks of their own, these skip it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from mrl.algorithms.base import PROXIMAL, REFERENCE, Algorithm
from mrl.config.config import Config
from mrl.distributed.collectives import everyone, together
from mrl.distributed.watchdog.graceful_stop import Stop
from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.errors import UserError
from mrl.observability import data_sources
from mrl.observability import metrics as measure
from mrl.rollout import turn_credit
from mrl.rollout.dispatch import StepBatch, pack
from mrl.rollout.partial_rollout import stream
from mrl.rollout.prompt_assignment import generate, whole_prompts
from mrl.rollout.sample_table import gather_facts, gather_failures, gather_table, outcomes
from mrl.trainer.learning_rate import learning_rate
from mrl.trainer.rank_roles import on_trainers
from mrl.trainer.resolve import prepare
from mrl.trainer.startup import open_job
from mrl.trainer.supervised import supervised_batch
from mrl.trainer.trainer import Job
from mrl.trainer.warm_start import begin_warm_start
from mrl.types import Prompt, Rollout, RolloutBatch, SampleTable

Metrics = dict[str, float]


def train(config: Config, stop: Stop | None = None) -> None:
    """Trains, or continues, the run that the config describes (`mrl train`).

    Args:
        config: Of the run.
        stop: Heard between steps and between the phases before a step's update; `stop.why` says whether it ended this.

    Raises:
        UserError: A mistake that the user can mend; every rank raises it.
    """
    finished = False
    with open_job(prepare(config)) as job, job.progress.stops_in_order(stop, job.commits.write_standing):
        config = job.config
        done = job.resume()
        if done is None:
            done = 0
            warm_start(job)
            with job.progress.step(done):
                job.begin(done)
                held_out_metrics = evaluate_if_due(job, done)
            job.commits.write(done, held_out_metrics)
        if job.is_last(done):
            job.log.note(f"all {done} steps are done; raise train.num_steps or train.num_epochs to go on")
        step = done
        while not job.is_last(step):
            step += 1
            with job.progress.step(step):
                job.commits.settle()
                metrics = job.progress.unlogged(step) or one_step(job, step)
                job.progress.reached(step, unlogged=metrics)
                held_out_metrics = evaluate_if_due(job, step)
            job.log.step(step, metrics | job.rates.metrics())
            job.progress.reached(step, metrics | held_out_metrics)
            if job.is_last(step) or is_due(step, config.checkpoint.interval):
                job.commits.write(step, metrics | held_out_metrics)
        job.commits.settle(wait=True)
        finished = True
    if finished and job.groups.rank == 0 and config.observe.report:
        # The ranks have left their process group: no rank waits for this one in a collective, however long it draws.
        from mrl.observability.report import report_at_end  # one rank's need: bokeh takes a second to import

        report_at_end(job.run.root, announces=config.observe.console != "off")


def one_step(job: Job, step: int) -> Metrics:
    """Of the algorithm's kind."""
    return supervised_step(job, step) if job.algorithm.supervised else reinforcement_step(job, step)


def reinforcement_step(job: Job, step: int) -> Metrics:
    """Sample, score, update. Up to the update a step can be abandoned.

    With `train.mode=async` the samples were made beside the updates before, and those of later steps are made now.
    """
    config, phase, flight = job.config, job.progress.phase, job.state.in_flight
    with phase("update_weights"):
        metrics = job.refit_if_stale()
    flight.sampled_by(job.state.policy_version, step - 1)

    if flight.missing or not flight.schedule.lead:
        sample(job, step, everyone())
    table, rollouts, metrics_of_sampling = job.take(step)
    job.show(step, rollouts, "train")

    with phase("pack"):
        data = pack(
            rollouts,
            table,
            job.groups,
            config.train.minibatch_size or config.train.batch_size,
            shares=config.actor.use_prefix_grouper,
            routing=job.sampler.routing,
            only_newest=config.rollout.mask_offpolicy,
        )
    if flight.schedule.lead:
        train = partial(judge_and_learn, job, step, data, table)
        judged, learned, of_critic = job.beside(train, partial(sample, job, step + 1, beside=True))
    else:
        job.sampler.rest()
        judged = job.on_trainers(partial(judge, job, step, data, table), may_stop=True)
        learned, of_critic = job.on_trainers(partial(learn, job, step, data))

    job.state.reference.update(step)
    job.rates.trained(table["prompt_len"], table["response_len"])
    metrics |= learned | metrics_of_sampling | judged | of_critic
    return metrics | measure.progress_metrics(global_step=step, epoch=job.state.epoch)


def judge_and_learn(job: Job, step: int, data: StepBatch, table: SampleTable) -> tuple[Metrics, Metrics, Metrics]:
    """On ranks that train: `judge`, then `learn`."""
    return judge(job, step, data, table), *learn(job, step, data)


def judge(job: Job, step: int, data: StepBatch, table: SampleTable) -> Metrics:
    """On ranks that train: all that the losses read, log-probabilities, values and advantages, into the batch."""
    algorithm, phase = job.algorithm, job.progress.phase
    later, now = scored_later(job, step, data), None
    if algorithm.needs_proximal and PROXIMAL not in later:
        with phase("old_log_prob"):
            now = job.policy.proximal(data.batch)
            data.batch.proximal_logprobs_R = now[0]
    if algorithm.needs_reference and REFERENCE not in later:
        scored = now if job.policy.scores_as_reference else None
        if scored is None:
            with phase("ref"), job.policy.reference():
                scored = job.policy.score(data.batch)
            now = scored if job.policy.scores_as_reference and len(data.minibatches) == 1 else now
        data.batch.ref_logprobs_R = scored[0]
    if algorithm.needs_current and now is not None:  # the first minibatch's, which is not scored again
        data.batch.current_logprobs_R, data.batch.current_entropy_R = now
    if job.teachers is not None:
        with phase("teacher"):
            job.teachers.score(data.batch)
    if job.critic is not None:
        with phase("values"):
            job.critic.values(data.batch)
    with phase("adv"):
        facts = outcomes(table, job.reward_weights)
        facts = replace(facts, rewards_N=algorithm.shape_rewards(facts))
        data.batch.rewards_B = facts.rewards_N[data.index_B].float()
        credited, index_U = facts, data.index_B
        if algorithm.config.credit == "turn":
            credited, index_U = turn_credit.credited(facts, table, data, job.config.reward)
        advantages_N = algorithm.outcome_advantages(credited)
        algorithm.advantages(data.batch, advantages_N[index_U], job.sum_over_dp)
    return measure.outcome_metrics(table, rewards_N=facts.rewards_N, advantages_N=advantages_N)


def scored_later(job: Job, step: int, data: StepBatch) -> Collection[str]:
    """On ranks that train: the log-probabilities that no pass before the update has to make."""
    if step <= job.config.train.critic_warmup:  # there is no update
        return {PROXIMAL, REFERENCE} - job.algorithm.reads_early
    return job.policy.own_scores(job.algorithm) if len(data.minibatches) == 1 else ()


def learn(job: Job, step: int, data: StepBatch) -> tuple[Metrics, Metrics]:
    """On ranks that train: the updates of a step; what the actor's told, and the critic's."""
    learned: Metrics = {}
    of_critic: Metrics = {}
    if job.critic is not None:
        with job.timers.phase("update_critic"):
            of_critic = job.critic.update(data, job.sum_over_dp)
    if step > job.config.train.critic_warmup:
        with job.timers.phase("update_actor"):
            learned = update(job, data)
    return learned, of_critic


def sample(job: Job, step: int, over: dist.ProcessGroup, *, beside: bool = False) -> None:
    """Collective over `over`, which has the ranks that sample: until a batch of scored groups is there for `step`.

    Dynamic sampling drops groups that teach nothing and draws as many new prompts, up to `max_sampling_rounds` times.

    Args:
        job: The job.
        step: The next one that trains.
        over: Who takes part.
        beside: The updates of the step before it run meanwhile.
    """
    config, flight, sampling = job.config, job.state.in_flight, job.sampler.training
    dynamic, steps = config.algorithm.dynamic_sampling, step - 2 if beside else step - 1
    ahead = beside
    flight.age(step)
    for _ in range(config.algorithm.max_sampling_rounds if dynamic else 1):
        flight.draw(job.state.source.next(flight.room(step, beside=beside)))
        groups = flight.unfinished(step, beside=beside)
        if not groups or flight.enough((), step, ahead=ahead):
            return
        with job.progress.phase("gen"), together(over), job.sampler.awake() as engine:
            if flight.schedule.by_parts:
                args = sampling, job.groups, job.state.history, over
                rollouts, whole = stream(engine, flight, groups, *args, step=step, steps=steps, ahead=ahead)
            else:
                found = answers(job, engine, [flight.prompt(group.uid) for group in groups], sampling)
                rollouts, uids = whole_prompts(found, sampling.n, over)
                whole = [group.uid for group in groups if group.uid in uids]
        if not whole:  # told to stop before anything was
            return
        table = score(job, rollouts, sampling, over, flight.tally.notes.append)
        told = table.scored
        if dynamic:
            told = told.keep(job.algorithm.informative_groups(outcomes(told, job.reward_weights)))
        flight.became_whole(whole, rollouts, table, told, steps, job.groups.grid)
        ahead = False
        if not flight.missing:
            return


def answers(job: Job, engine: RolloutEngine, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
    """Collective over the ranks that sample: rollouts of this replica for its part of the prompts, all whole."""
    converse = None if job.episodes is None else job.episodes.run
    return generate(engine, prompts, sampling, job.groups, job.state.history, converse)


def score(
    job: Job,
    rollouts: list[Rollout],
    sampling: SamplingConfig,
    over: dist.ProcessGroup,
    tell: Callable[[str], None],
) -> SampleTable:
    """Collective over `over`: rewards of this replica's rollouts; the table of all. `tell` hears of failures."""
    scores = None
    if job.reward_model is not None:
        with job.progress.phase("reward_model"):
            scores = job.reward_model.score(rollouts)
    with job.progress.phase("reward"), together(over):
        if job.scorer is not None:
            job.scorer.score(rollouts, job.progress.told_to_stop, scores)
    asked = {"supports": sampling.with_support, "turns": job.algorithm.config.credit == "turn"}
    table = gather_table(rollouts, job.groups, list(job.reward_weights), over=over, **asked)
    if told := gather_failures(rollouts, table, job.groups, over):
        tell(f"WARNING {told}")
    return table


def update(job: Job, data: StepBatch) -> Metrics:
    """Optimizer steps on the minibatches of a step, `actor.ppo_epochs` times."""
    stats: list[Metrics] = []
    is_one = len(data.minibatches) == 1  # it keeps what the first update scores
    for _ in range(job.config.actor.ppo_epochs):
        for rows in data.minibatches:
            minibatch = data.batch if is_one else data.batch.select(rows)
            stats.append(optimizer_step(job, minibatch, job.algorithm, first=not stats))
    return measure.combine(stats)


def optimizer_step(job: Job, minibatch: RolloutBatch, algorithm: Algorithm, *, first: bool = False) -> Metrics:
    """One step of the optimizer on a minibatch.

    Args:
        job: The job.
        minibatch: Of the step's samples.
        algorithm: Weighs them.
        first: No update of this step has moved the weights.
    """
    if algorithm.needs_current and not (first and minibatch.current_logprobs_R is not None):
        minibatch.current_logprobs_R, minibatch.current_entropy_R = job.policy.score(minibatch)
    algorithm.weigh(minibatch, job.sum_over_dp)
    job.state.policy_version += 1
    metrics = job.policy.update(minibatch, algorithm, compare=first)
    return metrics | algorithm.entropy_control.follow(metrics)


def warm_start(job: Job) -> None:
    """Supervised steps before reinforcement learning, on prompts of the same data in another order."""
    config = job.config.train.warm_start
    if not config.num_steps:
        return
    job.log.note(f"warm start: {config.num_steps} supervised steps")
    algorithm, source, done = begin_warm_start(job)
    for step in range(done + 1, config.num_steps + 1):
        with job.progress.step(step), job.timers.phase("warm_start"):
            prompts = source.next(config.batch_size)
            metrics = job.on_trainers(partial(imitate, job, prompts, algorithm))
        job.log.warm_start(step, metrics | job.timers.metrics())
        job.progress.reached(0, warm_start={"step": step, "source": source.state_dict()})
    with on_trainers(job.groups) as here:
        if here:
            job.policy.start_optimizer(learning_rate(job.config))


def imitate(job: Job, prompts: list[Prompt], algorithm: Algorithm) -> Metrics:
    """On ranks that train: a supervised step."""
    batch, _ = supervised_batch(prompts, job.tokenizer, job.groups, job.config, job.tools)
    return optimizer_step(job, batch, algorithm)


def supervised_step(job: Job, step: int) -> Metrics:
    """One step of `algorithm.name=sft`, or of `algorithm.name=dpo`, which also asks the reference."""
    job.sampler.rest()  # from the last evaluation
    with job.timers.phase("pack"):
        prompts = job.state.source.next(job.config.train.batch_size)
        learns_from = job.algorithm.learns_from
        batch, lens_N2 = supervised_batch(
            prompts, job.tokenizer, job.groups, job.config, job.tools, learns_from=learns_from
        )
    if job.algorithm.needs_reference:
        with job.timers.phase("ref"), job.policy.reference():
            batch.ref_logprobs_R, _ = job.policy.score(batch, supervised=True)
    with job.timers.phase("update_actor"):
        metrics = optimizer_step(job, batch, job.algorithm)
    job.state.reference.update(step)
    job.rates.trained(lens_N2[:, 0], lens_N2[:, 1])
    return metrics


def evaluate_if_due(job: Job, step: int) -> Metrics:
    """Evaluates and logs at step 0, at the last and every `train.eval_interval` steps; {} when it is not due."""
    interval = job.config.train.eval_interval
    if not job.validation or not (step == 0 or job.is_last(step) or is_due(step, interval)):
        return {}
    with job.timers.phase("testing"):
        metrics, rollouts = held_out(job)
    if job.config.checkpoint.keep_best:
        measure.check_is_given(job.config.checkpoint.best_metric, metrics)
    job.log.evaluation(step, metrics)
    job.show(step, rollouts, "val")
    return metrics


def held_out(job: Job) -> tuple[Metrics, list[Rollout]]:
    """Metrics on the held-out prompts, and this replica's rollouts in the order of the prompts."""
    job.refit_if_stale()
    sampling = job.sampler.held_out
    with job.progress.phase("gen"), together(), job.sampler.awake() as engine:
        rollouts = answers(job, engine, job.validation, sampling)
    table = score(job, rollouts, sampling, everyone(), job.log.note)
    rollouts.sort(key=lambda rollout: (rollout.prompt.uid, rollout.sample_index))
    names = {prompt.uid: prompt.data_source for prompt in job.validation}
    by_source = data_sources.held_out_metrics(table, names, gather_facts(rollouts, job.groups))
    return measure.evaluation_metrics(table) | by_source, rollouts


def is_due(step: int, interval: int) -> bool:
    """Every `interval` steps; 0: never."""
    return interval > 0 and step % interval == 0


def evaluate(config: Config, checkpoint: str | None = None) -> dict[str, Any]:
    """Scores a checkpoint on the held-out prompts (`mrl evaluate`).

    Args:
        config: Of the run.
        checkpoint: A step, a checkpoint folder, or None: the newest of the run folder, else the initial model.

    Returns:
        "checkpoint", which says what was scored, and the metrics; the same on every rank.

    Raises:
        UserError: There are no held-out prompts, or no such checkpoint.
    """
    with open_job(prepare(config, resumes=False), log=False, trains=False) as job:
        if not job.validation:
            raise UserError("there are no held-out prompts to evaluate on: set data.val_files or data.task.")
        loaded = job.commits.load_for_evaluation(checkpoint)
        metrics, _ = held_out(job)
        return {"checkpoint": loaded, **metrics}
