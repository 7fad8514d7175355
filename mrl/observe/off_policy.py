"""How old the weights were that sampled what a step trains on, and what stayed in flight; names as verl's.

Pure functions of a step's table.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mrl.observe.metrics import spread
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
        `training/off_policy/{long,short}_response_staleness`: the first is larger where long answers come later.
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
    order = table["response_len"].argsort(stable=True)
    half = len(order) // 2
    for name, part in (("short", order[:half]), ("long", order[half:])):
        if len(part):
            metrics[f"training/off_policy/{name}_response_staleness"] = oldest[part].mean().item()
    return metrics | {"rollout/num_carried_groups": float(num_carried)}
