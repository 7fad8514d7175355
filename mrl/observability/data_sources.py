"""Metrics per data set (`Prompt.data_source`) of training samples, and of held-out samples under verl's names.

Every held-out prompt has n samples. For each variable of a sample (its reward, and other numbers that a reward function
returns, see `rewards/base.py`) verl reports

- `mean@n`, `std@n`: mean and population standard deviation over the samples of a prompt;
- `best@k/mean`, `worst@k/mean`, and with /std their standard deviations, for k = 2, 4, 8 ... and n: the best and the
  worst of k samples drawn with replacement, over 1000 draws;
- `maj@k/mean`, `maj@k/std` where the reward function returns "pred": the variable's value for the most frequent "pred"
  among the k drawn samples;

each averaged over the prompts. `mean`, `best` and `maj` of the largest k are reported as `val-core/<data
set>/<variable>/...` for the variable "acc" (or "reward" where no function returns "acc"); all others as `val-aux/...`.

Source: verl, verl/trainer/ppo/metric_utils.py (process_validation_metrics) and ray_trainer.py (_val_metrics_update).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mrl.types import SampleTable

NUM_DRAWS = 1000
DRAW_SEED = 42
"""Seed of verl's bootstrap; every prompt and variable is resampled with the same draws."""

CORE = ("mean", "maj", "best")
VOTE = "pred"

Facts = Mapping[str, float | str]
Values = NDArray[np.float64]


def training_metrics(table: SampleTable, names: Mapping[int, str]) -> dict[str, float]:
    """Returns `train/<data set>/{reward/mean,accuracy,response_length/mean,frac}` of one step.

    Args:
        table: One row per sample.
        names: Data set name of each prompt by uid.
    """
    sources = [names[int(uid)] for uid in table["uid"].tolist()]
    metrics: dict[str, float] = {}
    for name in sorted(set(sources)):
        part = table.keep(torch.tensor([source == name for source in sources]))
        metrics |= {
            f"train/{name}/reward/mean": part["reward"].mean().item(),
            f"train/{name}/accuracy": part["correct"].mean().item(),
            f"train/{name}/response_length/mean": part["response_len"].mean().item(),
            f"train/{name}/frac": len(part) / len(table),
        }
    return metrics


def held_out_metrics(
    table: SampleTable, names: Mapping[int, str], facts: Mapping[tuple[int, int], Facts]
) -> dict[str, float]:
    """Returns held-out results per data set, under the names in the module docstring.

    Args:
        table: One row per sample.
        names: Data set name of each prompt by uid.
        facts: Extra values that the reward functions returned, by (uid, sample index). A prompt is left out of a
            variable if any of its samples lacks it (its function failed).
    """
    prompts: dict[str, dict[int, list[Facts]]] = {}
    parts = [name for name in table.columns if name.startswith("reward/")]
    columns = {name.removeprefix("reward/"): table[name].tolist() for name in parts if len(parts) > 1}
    for row, (uid, sample, reward) in enumerate(
        zip(table["uid"].long().tolist(), table["sample_index"].long().tolist(), table["reward"].tolist(), strict=True)
    ):
        told = {name: values[row] for name, values in columns.items()}
        known = {**told, **facts.get((uid, sample), {}), "reward": reward}
        prompts.setdefault(names[uid], {}).setdefault(uid, []).append(known)
    metrics: dict[str, float] = {}
    for name in sorted(prompts):
        variables = _variables(list(prompts[name].values()))
        core = "acc" if "acc" in variables else "reward"
        for variable, found in variables.items():
            largest = max(int(label.partition("@")[2].partition("/")[0]) for label in found)
            for label, value in found.items():
                is_core = variable == core and label.startswith(CORE) and f"@{largest}" in label
                metrics[f"val-{'core' if is_core else 'aux'}/{name}/{variable}/{label}"] = value
    return metrics


def headlines(names: Iterable[str]) -> dict[str, str]:
    """Returns the `val-core/.../mean@n` metric of each data set; {} for fewer than two data sets.

    Args:
        names: Names of metrics.
    """
    matches = [re.fullmatch(r"val-core/(.+)/[^/]+/mean@\d+", name) for name in names]
    found = {match[1]: match[0] for match in matches if match}
    return found if len(found) > 1 else {}


def _variables(prompts: Sequence[Sequence[Facts]]) -> dict[str, dict[str, float]]:
    """Returns {variable: {"mean@n": ...}}, averaged over prompts given as lists of their samples' values."""
    results: dict[str, dict[str, list[float]]] = {}
    for samples in prompts:
        voted = [sample.get(VOTE) for sample in samples]
        votes = None if None in voted else [voted.index(vote) for vote in voted]
        for variable in dict.fromkeys(key for sample in samples for key in sample):
            values = [sample.get(variable) for sample in samples]
            if all(isinstance(value, float) and math.isfinite(value) for value in values):
                for label, number in _prompt_statistics(np.array(values, dtype=np.float64), votes).items():
                    results.setdefault(variable, {}).setdefault(label, []).append(number)
    return {
        variable: {label: float(np.mean(numbers)) for label, numbers in labels.items()}
        for variable, labels in results.items()
    }


def _prompt_statistics(values_N: Values, votes: Sequence[int] | None) -> dict[str, float]:
    """Returns one prompt's statistics of one variable; samples with equal "pred" have equal numbers in `votes`."""
    size = len(values_N)
    found = {f"mean@{size}": float(values_N.mean())}
    if size == 1:
        return found
    found[f"std@{size}"] = float(values_N.std())
    for k in [*(2**power for power in range(1, size.bit_length()) if 2**power < size), size]:
        draws_DK = np.random.RandomState(DRAW_SEED).choice(size, size=(NUM_DRAWS, k), replace=True)
        drawn_DK = values_N[draws_DK]
        kinds = {"best": drawn_DK.max(1), "worst": drawn_DK.min(1)}
        if votes is not None:
            votes_DK = np.array(votes)[draws_DK]
            support_DK = (votes_DK[:, :, None] == votes_DK[:, None, :]).sum(2)
            kinds["maj"] = drawn_DK[np.arange(NUM_DRAWS), support_DK.argmax(1)]
        for kind, results_D in kinds.items():
            found[f"{kind}@{k}/mean"], found[f"{kind}@{k}/std"] = float(results_D.mean()), float(results_D.std())
    return found
