"""Staleness of the samples that a step trains, under verl's metric names; all functions are pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mrl.observability.metrics import spread
from mrl.types import SampleTable


def staleness_metrics(table: SampleTable, age_of: Callable[[int], int], *, num_carried: int) -> dict[str, float]:
    """Returns the staleness of the samples of a step, counted in steps.

    Args:
        table: Samples of the step.
        age_of: Function from a policy version to the number of steps between it and the weights being trained.
        num_carried: Groups with samples that remain in the rollout buffer after the step took its own.

    Returns:
        `training/off_policy/trajectory_{staleness,staleness_worst,spans}/{mean,max,min}` (age of a response's newest
        and oldest token, and the number of versions that sampled it), `rollout/num_carried_groups`, and
        `training/off_policy/{long,short}_response_staleness`: the mean age of the oldest token over the longer and the
        shorter half of the responses. The first is larger where long responses arrive later. Responses of equal length
        are spread evenly over both halves.
    """
    versions = {int(v) for name in ("version", "oldest_version") for v in table[name].tolist()}
    ages = {version: age_of(version) for version in versions}
    newest, oldest = (
        torch.tensor([ages[int(v)] for v in table[name].tolist()], dtype=torch.float64)
        for name in ("version", "oldest_version")
    )
    found = {"staleness": newest, "staleness_worst": oldest, "spans": table["num_versions"]}
    metrics: dict[str, float] = {}
    for name, values in found.items():
        metrics |= spread(f"training/off_policy/trajectory_{name}", values)
    by_length = mean_by_length(table["response_len"], oldest)
    half = len(by_length) // 2
    for name, part in (("short", by_length[:half]), ("long", by_length[half:])):
        if len(part):
            metrics[f"training/off_policy/{name}_response_staleness"] = part.mean().item()
    return metrics | {"rollout/num_carried_groups": float(num_carried)}


def mean_by_length(lens_N: Tensor, values_N: Tensor) -> Tensor:
    """Sorts values by length, shortest first, fp64; samples of equal length all get the mean of their values.

    Args:
        lens_N: Lengths.
        values_N: Numbers or bools.
    """
    _, place_N, num_U = torch.unique(lens_N, return_inverse=True, return_counts=True)
    sum_U = torch.zeros(len(num_U), dtype=torch.float64).index_add_(0, place_N, values_N.double())
    by_length_N: Tensor = (sum_U / num_U)[place_N.sort().values]
    return by_length_N


def acceptance_metrics(
    *, accepted: Sequence[int], started: Sequence[int], carried: Sequence[int], quarters: Sequence[float | None]
) -> dict[str, float]:
    """Returns whether trained samples are shorter than started ones; the first three arguments are (samples, tokens).

    Args:
        accepted: Samples trained since the run started.
        started: The former, the discarded ones, and those in the rollout buffer after the step.
        carried: Samples in the rollout buffer after the step.
        quarters: Fraction of samples that were trained by the step that requested them, for each quarter of the last
            steps' samples by length, shortest first; None for a quarter without samples.

    Returns:
        `rollout/num_{accepted,begun}_samples`, `rollout/{accepted,begun}_mean_length` (tokens, over the run),
        `rollout/carried_mean_length` and `rollout/accepted_at_once/quarter_{1,2,3,4}`. An unfinished sample counts with
        its tokens so far, so the mean length of started samples is a lower bound.
    """
    metrics = {"rollout/num_accepted_samples": float(accepted[0]), "rollout/num_begun_samples": float(started[0])}
    lengths = {
        "rollout/accepted_mean_length": accepted,
        "rollout/begun_mean_length": started,
        "rollout/carried_mean_length": carried,
    }
    for name, (count, tokens) in lengths.items():
        if count:
            metrics[name] = tokens / count
    found = {f"rollout/accepted_at_once/quarter_{number}": part for number, part in enumerate(quarters, 1)}
    return metrics | {name: part for name, part in found.items() if part is not None}
