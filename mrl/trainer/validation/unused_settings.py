"""Rules against settings that would have no effect; those of `algorithm` are in `algorithms/base.py`.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.config import Config, DataConfig, LearnsFrom, RolloutConfig
from mrl.config.user_code import is_object
from mrl.parallel_layout import ParallelLayout

Case = tuple[str, bool, str]
"""(key, True if it is set without effect, reason)."""


def unused_setting_rules(config: Config, grid: ParallelLayout, *, learns_from: LearnsFrom = "samples") -> Iterator[str]:
    """Yields a message for each setting that would have no effect.

    Args:
        config: Config to check.
        grid: Parallel layout.
        learns_from: Kind of data that the algorithm trains on: "samples", "responses" or "pairs".
    """
    for key, ignored, reason in (
        *_training(config, grid, learns_from),
        *_sampling(config, supervised=learns_from != "samples"),
        *_data(config, learns_from),
        *_workers(config),
    ):
        if ignored:
            yield f"{key} is set, but would have no effect because {reason}. Remove it, or change that."


def _training(config: Config, grid: ParallelLayout, learns_from: LearnsFrom) -> Iterator[Case]:
    actor, reference, train = config.actor, config.reference, config.train
    supervised = learns_from != "samples"
    yield "model.overrides", bool(config.model.overrides) and config.model.path is not None, "model.path is set"
    unneeded, why = config.algorithm.kl_in == "none" and learns_from != "pairs", "algorithm.kl_in is none"
    yield "reference.path", reference.path is not None and unneeded, why
    yield "reference.update_interval", reference.update_interval > 0 and unneeded, why
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        is_set = getattr(config.parallel, name) is not None
        yield f"parallel.{name}", is_set and grid.pp == 1, "parallel.pipeline_model_parallel_size is 1"
    once = f"algorithm.name={config.algorithm.name} takes one optimizer step on each batch"
    split = train.minibatch_size not in (None, train.batch_size)
    yield f"train.minibatch_size={train.minibatch_size}", supervised and split, once
    yield f"actor.ppo_epochs={actor.ppo_epochs}", supervised and actor.ppo_epochs > 1, once
    metric, best = config.checkpoint.best_metric, config.checkpoint.keep_best
    yield (
        f"checkpoint.best_metric={metric}",
        metric != type(config.checkpoint)().best_metric and not best,
        ("checkpoint.keep_best is 0"),
    )
    stopping = train.early_stopping
    for name in ("metric", "mode", "min_delta"):
        value = getattr(stopping, name)
        is_set = value != getattr(type(stopping), name)
        off = "train.early_stopping.patience is 0"
        yield f"train.early_stopping.{name}={value}", is_set and not stopping.patience, off


def _sampling(config: Config, *, supervised: bool) -> Iterator[Case]:
    rollout, val = config.rollout, config.rollout.val_kwargs
    why = f"algorithm.name={config.algorithm.name} does not train on samples, and trains at temperature 1"
    for name in ("temperature", "top_k", "top_p", "min_p"):
        value = getattr(rollout, name)
        yield f"rollout.{name}={value}", supervised and value != getattr(RolloutConfig, name), why
    per_node, no_nodes = rollout.n_gpus_per_node, rollout.nnodes == 0
    is_set = per_node != RolloutConfig.n_gpus_per_node
    yield f"rollout.n_gpus_per_node={per_node}", is_set and no_nodes, "rollout.nnodes is 0"
    yield "rollout.stop", bool(rollout.stop) and rollout.ignore_eos, "rollout.ignore_eos is true"
    greedy = f"rollout.val_kwargs.{'temperature is 0' if val.do_sample else 'do_sample is false'}"
    yield "rollout.val_kwargs.temperature", not val.do_sample and val.temperature not in (0.0, 1.0), greedy
    truncates = (val.top_k, val.top_p, val.min_p) != (-1, 1.0, 0.0)
    yield "rollout.val_kwargs.top_k, top_p or min_p", val.greedy and truncates, greedy


def _data(config: Config, learns_from: LearnsFrom) -> Iterator[Case]:
    data, default = config.data, DataConfig()
    yield "data.task_kwargs", bool(data.task_kwargs) and data.task is None, "data.task is null"
    for name in ("prompt_key", "answer_key", "messages_key"):
        is_set = getattr(data, name) != getattr(default, name)
        yield f"data.{name}", is_set and data.task is not None, "data.task generates its own columns"
    for name in ("chosen_key", "rejected_key"):
        is_set = getattr(data, name) != getattr(default, name)
        yield f"data.{name}", is_set and data.task is not None, "data.task generates its own columns"
        why = f"algorithm.name={config.algorithm.name} does not learn from pairs"
        yield f"data.{name}", is_set and learns_from != "pairs", why
    unsupervised = learns_from == "samples" and not config.train.warm_start.num_steps
    for name in ("train_on_turns", "overlong_responses"):
        value = getattr(data, name)
        why = "no step is supervised (algorithm.name=sft or dpo, or train.warm_start.num_steps)"
        yield f"data.{name}={value}", unsupervised and value != getattr(default, name), why
    never = data.apply_chat_template == "never"
    yield "data.chat_template", data.chat_template is not None and never, "data.apply_chat_template is never"
    reward = config.reward
    idle = all(function.weight == 0 for function in reward.functions)
    idle = idle and (reward.model.path is None or reward.model.weight == 0)
    any_named = bool(reward.functions) or reward.model.path is not None
    yield "reward.functions", idle and any_named, "every weight is 0, so all rewards would be equal"


def _workers(config: Config) -> Iterator[Case]:
    """Limits of worker processes, where only Python objects of a script run, which need none."""
    reward, agent = config.reward, config.rollout.agent
    why = (
        "is a Python object, which is called in the trainer's process. To use workers, name it as path/to/file.py:name"
    )
    objects_only = bool(reward.functions) and all(is_object(function.name) for function in reward.functions)
    for name in ("time_limit_s", "memory_limit_mb", "num_workers", "cache_mb"):
        is_set = getattr(reward, name) != getattr(type(reward), name)
        yield f"reward.{name}", objects_only and is_set, f"every reward function {why}"
    for name in ("time_limit_s", "memory_limit_mb", "num_workers"):
        is_set = getattr(agent, name) != getattr(type(agent), name)
        yield f"rollout.agent.{name}", is_object(agent.environment or "") and is_set, f"the environment {why}"
