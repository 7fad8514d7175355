"""Rules of the section `data`, and of evaluations and best checkpoints, which need held-out prompts.

Rows of the data are checked in `data/`. Imports no torch.
"""

from __future__ import annotations

import math
import os.path
from collections.abc import Iterator

from mrl.config.config import Config, DataConfig
from mrl.config.did_you_mean import did_you_mean_path
from mrl.data.prompt_order import BLOCK


def data_rules(config: Config) -> Iterator[str]:
    """Yields a message for each broken rule about prompts and rewards."""
    data = config.data
    if data.task is None and not data.train_files:
        yield "The config has no training prompts. Set data.train_files, or data.task."
    if data.task is not None and (data.train_files or data.val_files):
        yield f"data.task={data.task} generates its own rows. Remove data.train_files and data.val_files, or data.task."
    for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        for file in files:
            if not os.path.isfile(file):
                yield f"{key}: '{file}' does not exist.{did_you_mean_path(file)}"
    yield from _order_rules(data)
    if data.chat_template is not None and not os.path.isfile(data.chat_template):
        yield f"data.chat_template='{data.chat_template}' does not exist.{did_you_mean_path(data.chat_template)}"
    if not config.reward.functions and config.reward.model.path is None:
        yield "No response would have a reward. Set reward.functions, or reward.model.path."


def _order_rules(data: DataConfig) -> Iterator[str]:
    """Yields a message for each broken rule about the choice and the order of rows."""
    weights = data.train_weights
    if not weights:
        return
    parts = len([weight for weight in weights if weight])
    if len(weights) != len(data.train_files):
        yield (
            f"data.train_weights has {len(weights)} numbers for {len(data.train_files)} data.train_files. Give one for "
            "each file."
        )
    elif weights[0] == 0 or not all(0 <= weight < math.inf for weight in weights) or parts > BLOCK:
        yield (
            f"data.train_weights is {weights}, expected numbers above 0, at most {BLOCK} of them; 0 only for a file "
            "that continues the one before it."
        )
    elif parts > 1 and min(filter(None, weights)) / sum(weights) * BLOCK < 0.5:
        yield (
            f"data.train_weights is {weights}: a share below {0.5 / BLOCK:g} is too small to mix in. Raise it, or "
            "remove the file."
        )
    for key in ("order_by", "train_max_samples"):
        if getattr(data, key) is not None:
            yield f"data.{key} and data.train_weights are both set. Remove one of them."


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
