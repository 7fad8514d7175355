"""Rules of the section `data`, and of evaluations and best checkpoints, which need held-out prompts.

Rows of the data are checked in `data/`. Imports no torch.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator

from mrl.config.config import Config, DataConfig, orders_by_rewards
from mrl.config.did_you_mean import did_you_mean_path
from mrl.data.hub_files import is_local
from mrl.data.prompt_order import BLOCK


def data_rules(config: Config, *, supervised: bool = False) -> Iterator[str]:
    """Yields a message for each broken rule about prompts and rewards.

    Args:
        config: Config to check.
        supervised: True for an algorithm without rewards.
    """
    data = config.data
    if data.task is None and not data.train_files:
        yield "The config has no training prompts. Set data.train_files, or data.task."
    if data.task is not None and (data.train_files or data.val_files):
        yield f"data.task={data.task} generates its own rows. Remove data.train_files and data.val_files, or data.task."
    for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        for file in files:
            if not is_local(key, file):
                yield f"{key}: '{file}' does not exist.{did_you_mean_path(file)}"
    yield from _weight_rules(data)
    if supervised and orders_by_rewards(data):
        yield (
            f"data.order_by={data.order_by} orders the rows by their past rewards, but algorithm.name="
            f"{config.algorithm.name} scores no responses. Name a column of the data, or set data.order_by=null."
        )
    if data.chat_template is not None and not os.path.isfile(data.chat_template):
        yield f"data.chat_template='{data.chat_template}' does not exist.{did_you_mean_path(data.chat_template)}"
    if not config.reward.functions and config.reward.model.path is None:
        yield "No response would have a reward. Set reward.functions, or reward.model.path."


def _weight_rules(data: DataConfig) -> Iterator[str]:
    """Yields a message for each broken rule about `train_weights`."""
    weights, files = data.train_weights, data.train_files
    if not weights:
        return
    if len(weights) != len(files):
        yield (
            f"data.train_weights has {len(weights)} numbers for {len(files)} data.train_files. Give one for each of "
            "them, as [3,1]."
        )
    elif len(weights) > BLOCK:
        yield f"data.train_weights has {len(weights)} numbers; at most {BLOCK} files can be mixed. Join some files."
    elif min(weights) / sum(weights) * BLOCK < 0.5:
        place = weights.index(min(weights))
        yield (
            f"data.train_weights[{place}] is {weights[place]:g} of {sum(weights):g} in all: a share below "
            f"{0.5 / BLOCK:g} is too small to mix in. Raise it, or remove it together with '{files[place]}'."
        )
    if data.order_by is not None:
        yield (
            f"data.order_by={data.order_by} and data.train_weights are both set. With weights each file has epochs of "
            "its own, so there is no common order of all rows. Remove data.train_weights, or sort each file before."
        )
    if data.train_max_samples is not None:
        yield (
            "data.train_max_samples and data.train_weights are both set. With weights each file has epochs of its own "
            "and the shares do not depend on its size. Remove one of them, or shorten the files before."
        )


def evaluation_rules(config: Config) -> Iterator[str]:
    """Yields a message for each broken rule about evaluations."""
    held_out = config.data.task is not None or bool(config.data.val_files)
    if config.train.eval_interval and not held_out:
        yield f"train.eval_interval={config.train.eval_interval} needs held-out prompts. Set data.val_files."
    if config.checkpoint.keep_best and not (held_out and config.train.eval_interval):
        yield (
            f"checkpoint.keep_best={config.checkpoint.keep_best} needs evaluations to rank checkpoints. Set "
            "train.eval_interval, and data.val_files unless data.task is set."
        )
    patience = config.train.early_stopping.patience
    if patience and not (held_out and config.train.eval_interval):
        yield (
            f"train.early_stopping.patience={patience} counts evaluations. Set train.eval_interval, and data.val_files "
            "unless data.task is set."
        )
    metrics = {
        "checkpoint.best_metric": config.checkpoint.best_metric,
        "train.early_stopping.metric": config.train.early_stopping.metric,
    }
    for key, metric in metrics.items():
        if not metric.startswith(("val/", "val-")):
            yield (f"{key}={metric} is not an evaluation metric. Use one that starts with val/, such as val/accuracy.")


def needed_evaluation_metrics(config: Config) -> dict[str, str]:
    """Returns the evaluation metrics that the run depends on: config key -> name of the metric."""
    needed = {}
    if config.checkpoint.keep_best:
        needed["checkpoint.best_metric"] = config.checkpoint.best_metric
    if config.train.early_stopping.patience:
        needed["train.early_stopping.metric"] = config.train.early_stopping.metric
    return needed
