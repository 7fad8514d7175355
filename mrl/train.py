"""The training loop: start reading here. Functions are in the order in which they run.

One RL step (`reinforcement_step`):

1. sync weights: the rollout engine receives the actor's current weights.
2. sample: draw prompts, generate `rollout.n` responses to each and score them with the reward functions.
3. dispatch: send every sample to the data-parallel rank that trains on it.
4. prepare: log-probabilities of the actor, the reference and teachers, critic values, advantages.
5. update: one optimizer step for each minibatch, first of the critic, then of the actor.

Evaluation, logging and checkpoints follow in `train`. With `train.mode=async`, 2 runs ahead of 5 (`rollout/buffer.py`).

`trainer/trainer.py` builds the objects that the loop uses, `algorithms/` has advantages and losses, `megatron/actor.py`
the actor, `engines/` the rollout engines, `observability/` the metrics. Every rank calls every function here, except
those marked "Collective over the trainer ranks": with `rollout.num_ranks` > 0 some ranks only sample and skip these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from mrl.algorithms.base import PROXIMAL, REFERENCE, Algorithm
from mrl.config.config import Config
from mrl.distributed.collectives import (
    broadcast_from_rank_0,
    call_on_first_rank,
    raise_on_all_ranks,
    world_group,
)
from mrl.distributed.watchdog.graceful_stop import Stop
from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.errors import UserError
from mrl.observability import data_sources
from mrl.observability import metrics as measure
from mrl.observability.loggers.base import Opening
from mrl.rollout import turn_credit
from mrl.rollout.dispatch import StepBatch, dispatch_samples
from mrl.rollout.partial_rollout import sample_until_complete
from mrl.rollout.prompt_assignment import drop_incomplete_groups, generate
from mrl.rollout.sample_table import gather_failures, gather_reward_facts, gather_table, to_outcomes
from mrl.trainer.callbacks import TrainResult
from mrl.trainer.learning_rate import learning_rate
from mrl.trainer.rank_roles import on_trainers
from mrl.trainer.run_plan import build_run_plan
from mrl.trainer.startup import open_trainer
from mrl.trainer.supervised import supervised_batch
from mrl.trainer.trainer import Trainer
from mrl.trainer.user_objects import with_objects
from mrl.trainer.validation.data import needed_evaluation_metrics
from mrl.trainer.warm_start import begin_warm_start
from mrl.types import Prompt, Rollout, RolloutBatch, SampleTable

Metrics = dict[str, float]


def train(
    config: Config,
    stop: Stop | None = None,
    *,
    rewards: Sequence[Any] | None = None,
    environments: Sequence[Any] | None = None,
    algorithm: Any = None,
    callbacks: Sequence[Any] = (),
    loggers: Sequence[Any] = (),
) -> TrainResult:
    """Trains, or continues, the run that the config describes (`mrl train`).

    Each of the lists takes Python objects, names as in a config, and mappings with the keys of the config's entries:
    `rewards=[score, {"name": "length", "weight": 0.1}]`.

    Args:
        config: Complete settings; values that depend on the model or the data are resolved here.
        stop: Stop request, checked between steps and between the phases before a step's update. After the call
            `stop.why` says whether it ended the run.
        rewards: Reward functions, instead of `reward.functions`.
        environments: List of one environment class, instead of `rollout.agent.environment`; enables multi-turn
            episodes.
        algorithm: Subclass of `Algorithm`, instead of `algorithm.name`.
        callbacks: Instances or subclasses of `Callback`, in addition to `observe.callbacks`.
        loggers: Instances or subclasses of `Logger`, in addition to `observe.loggers`.

    Raises:
        UserError: Wrong input from the user; raised on every rank.
    """
    with with_objects(
        config,
        rewards=rewards,
        environments=environments,
        algorithm=algorithm,
        callbacks=callbacks,
        loggers=loggers,
    ) as complete:
        return run_training(complete, stop)


def run_training(config: Config, stop: Stop | None) -> TrainResult:
    """Runs the training loop, and writes the report at its end."""
    finished = False
    with (
        open_trainer(build_run_plan(config)) as trainer,
        trainer.progress.stop_gracefully(stop, trainer.checkpointing.write_saved_state),
    ):
        config, callbacks = trainer.config, trainer.callbacks
        done = trainer.resume()
        callbacks.begin(Opening(config, trainer.run, done))
        if done is None:
            done = 0
            warm_start(trainer)
            with trainer.progress.step(done):
                trainer.init_reference_and_critic(done)
                held_out_metrics = evaluate_if_due(trainer, done)
            trainer.checkpointing.write(done, held_out_metrics)
        if trainer.is_last(done):
            more = f"All {done} steps are done. Raise train.num_steps or train.num_epochs to continue."
            trainer.log.note(trainer.stopped_early(done) or more)
        step = done
        while not (trainer.is_last(step) or callbacks.ended_run()):
            step += 1
            with trainer.progress.step(step):
                trainer.checkpointing.finish_pending()
                metrics = trainer.progress.unlogged(step) or run_step(trainer, step)
                trainer.progress.record_state(step, unlogged=metrics)
                held_out_metrics = evaluate_if_due(trainer, step)
            trainer.log.step(step, metrics | trainer.rates.metrics())
            trainer.progress.record_state(step, metrics | held_out_metrics)
            callbacks.end_step(step, metrics | trainer.rates.metrics())
            if trainer.is_last(step) or callbacks.ended_run() or is_due(step, config.checkpoint.interval):
                trainer.checkpointing.write(step, metrics | held_out_metrics)
        trainer.checkpointing.finish_pending(wait=True)
        if callbacks.ended_run():
            trainer.log.note(f"{callbacks.stopped_by} ended the run after step {step}")
        elif step > done and (why := trainer.stopped_early(step)):
            trainer.log.note(f"the run ends after step {step}. {why}")
        finished = True
    # The process groups are destroyed, so that no rank waits in a collective while rank 0 draws.
    if finished and trainer.groups.rank == 0 and config.observe.report:
        from mrl.observability.report import report_at_end  # bokeh takes a second to import, and only rank 0 needs it

        report_at_end(trainer.run.root, announces=config.observe.console != "off")
    result = trainer.result(stop)
    trainer.callbacks.end(result)
    return result


def run_step(trainer: Trainer, step: int) -> Metrics:
    """Runs one supervised or one RL step, depending on the algorithm."""
    return supervised_step(trainer, step) if trainer.algorithm.supervised else reinforcement_step(trainer, step)


def reinforcement_step(trainer: Trainer, step: int) -> Metrics:
    """Runs one RL step: weight sync, sampling, dispatch, update. It can be abandoned until the update starts.

    With `train.mode=async` the samples of this step come from the buffer, and samples of later steps are generated
    while this one updates.
    """
    config, phase, buffer = trainer.config, trainer.progress.phase, trainer.state.buffer
    # 1. sync weights
    with phase("update_weights"):
        metrics = trainer.sync_weights_if_stale()
    buffer.record_policy_version(trainer.state.policy_version, step - 1)

    # 2. sample
    if buffer.num_missing or not buffer.schedule.lead:
        sample_rollouts(trainer, step, world_group())
    table, rollouts, sampling_metrics = trainer.take_batch(step)
    trainer.log_samples(step, rollouts, "train")

    # 3. dispatch
    with phase("pack"):
        data = dispatch_samples(
            rollouts,
            table,
            trainer.groups,
            config.train.minibatch_size or config.train.batch_size,
            keep_groups=config.actor.use_prefix_grouper,
            routing=trainer.rollout_worker.routing,
            mask_offpolicy=config.rollout.mask_offpolicy,
        )
    # 4. prepare and 5. update; in asynchronous mode the other ranks sample for the next steps meanwhile
    if buffer.schedule.lead:
        work = partial(prepare_and_update, trainer, step, data, table)
        outcome_metrics, actor_metrics, critic_metrics = trainer.train_while_sampling(
            work, partial(sample_rollouts, trainer, step + 1, overlapped=True)
        )
    else:
        trainer.rollout_worker.release_engine()
        outcome_metrics = trainer.run_on_trainers(partial(prepare_batch, trainer, step, data, table), may_stop=True)
        actor_metrics, critic_metrics = trainer.run_on_trainers(partial(update_models, trainer, step, data))

    trainer.state.reference.update(step)
    trainer.rates.record_step(table["prompt_len"], table["response_len"])
    metrics |= actor_metrics | sampling_metrics | outcome_metrics | critic_metrics
    return metrics | measure.progress_metrics(global_step=step, epoch=trainer.state.epoch)


def prepare_and_update(
    trainer: Trainer, step: int, data: StepBatch, table: SampleTable
) -> tuple[Metrics, Metrics, Metrics]:
    """Collective over the trainer ranks: runs `prepare_batch`, then `update_models`."""
    return prepare_batch(trainer, step, data, table), *update_models(trainer, step, data)


def prepare_batch(trainer: Trainer, step: int, data: StepBatch, table: SampleTable) -> Metrics:
    """Collective over the trainer ranks: fills in the batch's log-probabilities, values and advantages.

    Returns metrics of rewards and advantages.

    One forward pass of the actor can serve three purposes: proximal log-probabilities, those of the reference while
    both have the same weights, and the current ones of a single minibatch.
    """
    algorithm, phase = trainer.algorithm, trainer.progress.phase
    skipped = skipped_logprobs(trainer, step, data)
    actor_scores = None  # log-probabilities and entropies at the weights before the update
    if algorithm.needs_proximal and PROXIMAL not in skipped:
        with phase("old_log_prob"):
            actor_scores = trainer.actor.score_proximal(data.batch)
            data.batch.proximal_logprobs_R = actor_scores[0]
    if algorithm.needs_reference and REFERENCE not in skipped:
        ref_scores = actor_scores if trainer.actor.equals_reference else None
        if ref_scores is None:
            with phase("ref"), trainer.actor.using_reference():
                ref_scores = trainer.actor.score(data.batch)
            if trainer.actor.equals_reference and len(data.minibatches) == 1:
                actor_scores = ref_scores
        data.batch.ref_logprobs_R = ref_scores[0]
    if algorithm.needs_current and actor_scores is not None:
        data.batch.current_logprobs_R, data.batch.current_entropy_R = actor_scores
    if trainer.teachers is not None:
        with phase("teacher"):
            trainer.teachers.score(data.batch)
    if trainer.critic is not None:
        with phase("values"):
            trainer.critic.values(data.batch)
    with phase("adv"):
        samples = to_outcomes(table, trainer.reward_weights)
        samples = replace(samples, rewards_N=algorithm.checked_per_sample("shape_rewards", samples))
        data.batch.rewards_B = samples.rewards_N[data.index_B].float()
        credited, index_U = samples, data.index_B
        if algorithm.config.credit == "turn":
            credited, index_U = turn_credit.assign_turn_credit(samples, table, data, trainer.config.reward)
        advantages_N = algorithm.checked_per_sample("outcome_advantages", credited)
        algorithm.advantages(data.batch, advantages_N[index_U], trainer.sum_over_dp)
        algorithm.check_set(data.batch)
    return measure.outcome_metrics(table, rewards_N=samples.rewards_N, advantages_N=advantages_N)


def skipped_logprobs(trainer: Trainer, step: int, data: StepBatch) -> Collection[str]:
    """Returns which of PROXIMAL and REFERENCE need no forward pass before the update.

    A single minibatch gets them from the forward pass of its own update. A step without an actor update
    (`train.critic_warmup`) needs only those that the advantages read.
    """
    if step <= trainer.config.train.critic_warmup:
        return {PROXIMAL, REFERENCE} - trainer.algorithm.reads_early
    return trainer.actor.logprobs_from_update(trainer.algorithm) if len(data.minibatches) == 1 else ()


def update_models(trainer: Trainer, step: int, data: StepBatch) -> tuple[Metrics, Metrics]:
    """Collective over the trainer ranks: updates the critic, then the actor; returns the metrics (actor, critic)."""
    actor_metrics: Metrics = {}
    critic_metrics: Metrics = {}
    if trainer.critic is not None:
        with trainer.timers.phase("update_critic"):
            critic_metrics = trainer.critic.update(data, trainer.sum_over_dp)
    if step > trainer.config.train.critic_warmup:
        with trainer.timers.phase("update_actor"):
            actor_metrics = update_actor(trainer, data)
    return actor_metrics, critic_metrics


def sample_rollouts(trainer: Trainer, step: int, process_group: dist.ProcessGroup, *, overlapped: bool = False) -> None:
    """Collective over `process_group`: samples and scores until the buffer has a batch of complete groups for `step`.

    Dynamic sampling drops groups without a learning signal and draws as many new prompts, at most
    `algorithm.max_sampling_rounds` times.

    Args:
        trainer: The run.
        step: Next step that trains.
        process_group: Process group that contains at least all ranks that sample.
        overlapped: True if the update of `step - 1` is not done yet (`train.mode=async`).
    """
    config, buffer, sampling = trainer.config, trainer.state.buffer, trainer.rollout_worker.train_sampling
    dynamic, ahead = config.algorithm.dynamic_sampling, overlapped
    steps_done = step - 2 if overlapped else step - 1  # training steps done by the weights that sample
    buffer.restart_too_old(step)
    for _ in range(config.algorithm.max_sampling_rounds if dynamic else 1):
        num_drawn = buffer.num_drawable(step, concurrent=overlapped)
        buffer.draw(trainer.state.source.next(num_drawn, partial(call_on_first_rank, process_group)))
        groups = buffer.unfinished(step, concurrent=overlapped)
        if not groups or buffer.may_stop((), step, ahead=ahead):
            return
        with trainer.progress.phase("gen"), raise_on_all_ranks(process_group), trainer.rollout_worker.awake() as engine:
            if buffer.schedule.by_parts:
                args = sampling, trainer.groups, trainer.state.history, process_group
                rollouts, complete = sample_until_complete(
                    engine, buffer, groups, *args, step=step, steps=steps_done, ahead=ahead
                )
            else:
                found = generate_rollouts(trainer, engine, [buffer.prompt(group.uid) for group in groups], sampling)
                rollouts, uids = drop_incomplete_groups(found, sampling.n, process_group)
                complete = [group.uid for group in groups if group.uid in uids]
        if not complete:  # a stop was requested before any group was complete
            return
        table = score(trainer, rollouts, sampling, process_group, buffer.tally.notes.append)
        informative = table.scored
        if dynamic:
            informative = informative.keep(
                trainer.algorithm.informative_groups(to_outcomes(informative, trainer.reward_weights))
            )
        buffer.complete(complete, rollouts, table, informative, steps_done, trainer.groups.grid)
        ahead = False
        if not buffer.num_missing:
            return


def generate_rollouts(
    trainer: Trainer, engine: RolloutEngine, prompts: Sequence[Prompt], sampling: SamplingConfig
) -> list[Rollout]:
    """Collective over the ranks that sample: returns this replica's finished rollouts for its share of the prompts."""
    converse = None if trainer.episodes is None else trainer.episodes.run
    progress = trainer.rollout_worker.progress
    return generate(engine, prompts, sampling, trainer.groups, trainer.state.history, converse, progress)


def score(
    trainer: Trainer,
    rollouts: list[Rollout],
    sampling: SamplingConfig,
    process_group: dist.ProcessGroup,
    log: Callable[[str], None],
) -> SampleTable:
    """Collective over `process_group`: scores this replica's rollouts; returns the sample table of all replicas.

    Args:
        trainer: The run.
        rollouts: Samples of this replica.
        sampling: Their distribution; it says whether the kept token ids are in the table.
        process_group: Process group that contains at least all ranks that sample.
        log: Receives a warning about samples that could not be scored.
    """
    model_scores = None
    if trainer.reward_model is not None:
        with trainer.progress.phase("reward_model"):
            model_scores = trainer.reward_model.score(rollouts)
    with trainer.progress.phase("reward"), raise_on_all_ranks(process_group):
        if trainer.scorer is not None:
            trainer.scorer.score(rollouts, trainer.progress.abort_requested, model_scores)
    columns = {
        "with_kept_tokens": sampling.return_kept_tokens,
        "with_turn_rewards": trainer.algorithm.config.credit == "turn",
    }
    table = gather_table(rollouts, trainer.groups, list(trainer.reward_weights), over=process_group, **columns)
    if failures := gather_failures(rollouts, table, trainer.groups, process_group):
        log(f"WARNING {failures}")
    return table


def update_actor(trainer: Trainer, data: StepBatch) -> Metrics:
    """Runs `actor.ppo_epochs` passes of optimizer steps over the minibatches; returns metrics over all of them."""
    stats: list[Metrics] = []
    is_one = len(data.minibatches) == 1  # not copied: the first update stores its log-probabilities in the batch
    for _ in range(trainer.config.actor.ppo_epochs):
        for rows in data.minibatches:
            minibatch = data.batch if is_one else data.batch.select(rows)
            stats.append(optimizer_step(trainer, minibatch, trainer.algorithm, first=not stats))
    return measure.combine(stats)


def optimizer_step(trainer: Trainer, minibatch: RolloutBatch, algorithm: Algorithm, *, first: bool = False) -> Metrics:
    """Runs one optimizer step of the actor on a minibatch.

    Args:
        trainer: The run.
        minibatch: Sequences of this data-parallel index.
        algorithm: Gives the loss and the weight of each token.
        first: True before any update of this step has changed the weights.
    """
    if algorithm.needs_current and not (first and minibatch.current_logprobs_R is not None):
        minibatch.current_logprobs_R, minibatch.current_entropy_R = trainer.actor.score(minibatch)
    algorithm.weigh(minibatch, trainer.sum_over_dp)
    trainer.state.policy_version += 1
    metrics = trainer.actor.update(minibatch, algorithm, is_first_update=first)
    return metrics | algorithm.entropy_control.update(metrics)


def warm_start(trainer: Trainer) -> None:
    """Runs the supervised steps before RL (`train.warm_start`), on the training prompts in another order."""
    config = trainer.config.train.warm_start
    if not config.num_steps:
        return
    trainer.log.note(f"warm start: {config.num_steps} supervised steps")
    algorithm, source, done = begin_warm_start(trainer)
    for step in range(done + 1, config.num_steps + 1):
        with trainer.progress.step(step), trainer.timers.phase("warm_start"):
            prompts = source.next(config.batch_size, partial(call_on_first_rank, world_group()))
            source.release(source.position)
            metrics = trainer.run_on_trainers(partial(warm_start_step, trainer, prompts, algorithm))
        trainer.log.warm_start(step, metrics | trainer.timers.metrics())
        trainer.progress.record_state(0, warm_start={"step": step, "source": source.state_dict()})
    with on_trainers(trainer.groups) as here:
        if here:
            trainer.actor.start_optimizer(learning_rate(trainer.config))


def warm_start_step(trainer: Trainer, prompts: list[Prompt], algorithm: Algorithm) -> Metrics:
    """Collective over the trainer ranks: runs one supervised step on these prompts and their responses."""
    batch, _ = supervised_batch(prompts, trainer.tokenizer, trainer.groups, trainer.config, trainer.tools)
    return optimizer_step(trainer, batch, algorithm)


def supervised_step(trainer: Trainer, step: int) -> Metrics:
    """Runs one step of `algorithm.name=sft` or `algorithm.name=dpo`; DPO also scores with the reference."""
    trainer.rollout_worker.release_engine()  # the last evaluation may have left the engine's weights on the device
    with trainer.timers.phase("pack"):
        prompts = trainer.state.source.next(trainer.config.train.batch_size)
        learns_from = trainer.algorithm.learns_from
        batch, lens_N2 = supervised_batch(
            prompts, trainer.tokenizer, trainer.groups, trainer.config, trainer.tools, learns_from=learns_from
        )
    if trainer.algorithm.needs_reference:
        with trainer.timers.phase("ref"), trainer.actor.using_reference():
            batch.ref_logprobs_R, _ = trainer.actor.score(batch, supervised=True)
    with trainer.timers.phase("update_actor"):
        metrics = optimizer_step(trainer, batch, trainer.algorithm)
    trainer.state.reference.update(step)
    trainer.rates.record_step(lens_N2[:, 0], lens_N2[:, 1])
    return metrics


def evaluate_if_due(trainer: Trainer, step: int) -> Metrics:
    """Evaluates and logs at step 0, every `train.eval_interval` steps and at the last step; returns {} otherwise."""
    interval = trainer.config.train.eval_interval
    if not trainer.validation or not (step == 0 or trainer.is_last(step) or is_due(step, interval)):
        return {}
    with trainer.timers.phase("testing"):
        metrics, rollouts = run_validation(trainer)
    for key, metric in needed_evaluation_metrics(trainer.config).items():
        measure.check_is_given(key, metric, metrics)
    stopping = trainer.state.early_stopping
    if stopping.metric is not None:
        stopping.record(step, broadcast_from_rank_0(metrics[stopping.metric]))
    trainer.log.evaluation(step, metrics)
    trainer.log_samples(step, rollouts, "val")
    trainer.callbacks.end_evaluation(step, metrics)
    return metrics


def run_validation(trainer: Trainer) -> tuple[Metrics, list[Rollout]]:
    """Samples and scores the held-out prompts; returns metrics, and this replica's rollouts in prompt order."""
    trainer.sync_weights_if_stale()
    sampling = trainer.rollout_worker.val_sampling
    with trainer.progress.phase("gen"), raise_on_all_ranks(), trainer.rollout_worker.awake() as engine:
        rollouts = generate_rollouts(trainer, engine, trainer.validation, sampling)
    table = score(trainer, rollouts, sampling, world_group(), trainer.log.note)
    rollouts.sort(key=lambda rollout: (rollout.prompt.uid, rollout.sample_index))
    names = {prompt.uid: prompt.data_source for prompt in trainer.validation}
    by_source = data_sources.held_out_metrics(table, names, gather_reward_facts(rollouts, trainer.groups))
    return measure.evaluation_metrics(table) | by_source, rollouts


def is_due(step: int, interval: int) -> bool:
    """Returns whether `step` is a multiple of `interval`; never for interval 0."""
    return interval > 0 and step % interval == 0


def evaluate(
    config: Config,
    checkpoint: str | None = None,
    *,
    rewards: Sequence[Any] | None = None,
    environments: Sequence[Any] | None = None,
    algorithm: Any = None,
) -> dict[str, Any]:
    """Scores a checkpoint on the held-out prompts (`mrl evaluate`).

    Args:
        config: Settings of the run that wrote the checkpoint.
        checkpoint: Step number or checkpoint folder. None: the newest checkpoint of the run folder, or the initial
            model if there is none.
        rewards: Reward functions, instead of `reward.functions`; see `train`.
        environments: List of one environment class, instead of `rollout.agent.environment`.
        algorithm: Subclass of `Algorithm`, instead of `algorithm.name`.

    Returns:
        Metrics, and under "checkpoint" the step or path that was evaluated; the same on every rank.

    Raises:
        UserError: There are no held-out prompts, or no such checkpoint.
    """
    with (
        with_objects(config, rewards=rewards, environments=environments, algorithm=algorithm) as complete,
        open_trainer(build_run_plan(complete, resumes=False), log=False, trains=False) as trainer,
    ):
        if not trainer.validation:
            raise UserError("mrl evaluate found no held-out prompts in the config. Set data.val_files, or data.task.")
        loaded = trainer.checkpointing.load_for_evaluation(checkpoint)
        metrics, _ = run_validation(trainer)
        return {"checkpoint": loaded, **metrics}
