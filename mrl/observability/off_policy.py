"""How old the weights were that sampled what a step trains on, and what stayed in flight; names as verl's.

Pure functions of a step's table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mrl.observability.metrics import spread
from mrl.types import SampleTable


def staleness_metrics(table: SampleTable, age_of: Callable[[int], int], *, num_carried: int) -> dict[str, float]:
    """Ages in steps, over the samples of a step.

    Args:
        table: Of the step.
        age_of: Steps between the weights of a policy version and those that the step trains.
        num_carried: Groups in flight after the step has taken its own that have samples.

    Returns:
        `training/off_policy/trajectory_{staleness,staleness_worst,spans}/{mean,max,min}` (age of the newest and of the
        oldest token of a response, and how many versions sampled it), `rollout/num_carried_groups`, and of the longer
        and the shorter half of the responses the mean age of their oldest token,
        `training/off_policy/{long,short}_response_staleness`: the first is larger where long answers come later. Of
        responses of one length each half has the same part of every age.
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
    """The values by length, shortest first, fp64; samples of one length all have its mean, in whatever order they came.

    Args:
        lens_N: Lengths.
        values_N: Numbers or bools.
    """
    _, place_N, num_U = torch.unique(lens_N, return_inverse=True, return_counts=True)
    sum_U = torch.zeros(len(num_U), dtype=torch.float64).index_add_(0, place_N, values_N.double())
    by_length_N: Tensor = (sum_U / num_U)[place_N.sort().values]
    return by_length_N


def acceptance_metrics(
    *, accepted: Sequence[int], begun: Sequence[int], carried: Sequence[int], quarters: Sequence[float | None]
) -> dict[str, float]:
    """Whether what steps take is shorter than what is begun; each of the first three is (samples, their tokens).

    Args:
        accepted: Taken by a step since the run began.
        begun: These, those that were thrown away, and those in flight after the step.
        carried: In flight after the step.
        quarters: Of the last steps' samples, by quarters of their length, shortest first: the part of them that was
            taken by the step for which they began; None: there were none.

    Returns:
        `rollout/num_{accepted,begun}_samples`, `rollout/{accepted,begun}_mean_length` (tokens, over the run),
        `rollout/carried_mean_length` and `rollout/accepted_at_once/quarter_{1,2,3,4}`. A sample that is not whole
        counts with the tokens that it has: so the length of what was begun is a lower bound.
    """
    metrics = {"rollout/num_accepted_samples": float(accepted[0]), "rollout/num_begun_samples": float(begun[0])}
    lengths = {
        "rollout/accepted_mean_length": accepted,
        "rollout/begun_mean_length": begun,
        "rollout/carried_mean_length": carried,
    }
    for name, (count, tokens) in lengths.items():
        if count:
            metrics[name] = tokens / count
    found = {f"rollout/accepted_at_once/quarter_{number}": part for number, part in enumerate(quarters, 1)}
    return metrics | {name: part for name, part in found.items() if part is not None}
