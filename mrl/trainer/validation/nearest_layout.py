"""Nearest parallel layout that divides model and ranks, for the error about one that does not. Imports no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mrl.config.config import Config
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.trainer.validation.experts import experts_divide
from mrl.trainer.validation.parallel import build_parallel_layout, check_ranks, division_rules, layout_rules
from mrl.trainer.validation.rollout_ranks import num_rollout_ranks

MAX_CHECKED = 30
"""Number of nearest layouts on which all rules are tried."""
ETP_CHANGE = 0.5
"""Distance of another expert tensor-parallel size, in doublings of another size."""

Sizes = dict[str, Any]
"""Field of `parallel` or `rollout` -> value."""


def nearest_layout(config: Config, arch: ArchSpec, world_size: int, check: Callable[[Config], None]) -> str:
    """Returns advice with the nearest layout that works; "" if the layout divides everything, or none was found.

    Sizes of tensor, pipeline and expert parallelism change; the others stay. The distance of two layouts is the number
    of doublings between their sizes.

    Args:
        config: Config with a broken rule, not necessarily of its layout.
        arch: Architecture of the actor.
        world_size: Number of ranks of the job.
        check: Raises UserError where a config breaks any rule.
    """
    if world_size <= 1 or _divides(config, arch, world_size):
        return ""
    pairs = itertools.product(_actor_sizes(config, arch, world_size), _engine_sizes(config, arch, world_size))
    near = sorted(pairs, key=lambda pair: pair[0][0] + pair[1][0])[:MAX_CHECKED]
    for (_, parallel), (_, rollout) in near:
        changed = replace(
            config, parallel=replace(config.parallel, **parallel), rollout=replace(config.rollout, **rollout)
        )
        try:
            check(changed)
        except UserError:
            continue
        words = [*_differing("parallel", config.parallel, parallel), *_differing("rollout", config.rollout, rollout)]
        return f"The nearest layout that works on {world_size} ranks: {' '.join(words)}"
    return ""


def _divides(config: Config, arch: ArchSpec, world_size: int) -> bool:
    grid = build_parallel_layout(config, world_size)
    try:
        check_ranks(config, world_size)
    except UserError:
        return False
    if any(True for _ in layout_rules(config, grid)) or any(True for _ in division_rules(arch, grid)):
        return False
    return arch.moe is None or experts_divide(config, arch.moe, grid)


def _actor_sizes(config: Config, arch: ArchSpec, world_size: int) -> list[tuple[float, Sizes]]:
    """Returns (distance, fields of `parallel`) of layouts that divide the training ranks."""
    given = build_parallel_layout(config, world_size)
    ranks, moe = world_size - num_rollout_ranks(config.rollout), arch.moe
    found: list[tuple[float, Sizes]] = []
    experts = [1] if moe is None else [ep for ep in _around(given.ep) if moe.num_experts % ep == 0]
    for tp, pp in itertools.product(_around(given.tp), _around(given.pp)):
        if ranks % (tp * pp * given.cp):
            continue
        stage = ranks // pp
        for ep, etp in itertools.product(experts, dict.fromkeys((given.expert_tp, 1, tp) if moe else (tp,))):
            if stage % (ep * etp) or (ep == 1 and etp != tp):
                continue
            distance = _doublings((tp, given.tp), (pp, given.pp), (ep, given.ep))
            distance += ETP_CHANGE * (moe is not None and etp != given.expert_tp)
            fields: Sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
            if tp != given.tp:
                wanted = config.parallel.sequence_parallel or moe is not None
                fields["sequence_parallel"] = tp > 1 and wanted
            if pp == 1:
                fields["virtual_pipeline_model_parallel_size"] = None
            if moe is not None:
                fields["expert_model_parallel_size"] = ep
                if etp != (tp if config.parallel.expert_tensor_parallel_size is None else given.expert_tp):
                    fields["expert_tensor_parallel_size"] = etp
            found.append((distance, fields))
    return found


def _engine_sizes(config: Config, arch: ArchSpec, world_size: int) -> list[tuple[float, Sizes]]:
    """Returns (distance, fields of `rollout`) of replicas that divide the ranks that sample."""
    given, moe = build_parallel_layout(config, world_size), arch.moe
    ranks = num_rollout_ranks(config.rollout) or world_size
    found: list[tuple[float, Sizes]] = []
    experts = [1] if moe is None else [ep for ep in _around(given.rollout_ep) if moe.num_experts % ep == 0]
    for tp, ep in itertools.product(_around(given.rollout_tp), experts):
        if ranks % (tp * given.rollout_pp) == 0 and tp % ep == 0:
            fields: Sizes = {"tensor_model_parallel_size": tp}
            if moe is not None:
                fields["expert_parallel_size"] = ep
            found.append((_doublings((tp, given.rollout_tp), (ep, given.rollout_ep)), fields))
    return found


def _around(size: int) -> range:
    return range(1, 2 * size + 1)


def _doublings(*sizes: tuple[int, int]) -> float:
    return sum(abs(math.log2(one / other)) for one, other in sizes)


def _differing(section: str, given: object, fields: Sizes) -> Iterator[str]:
    for name, value in fields.items():
        if getattr(given, name) != value:
            text = "null" if value is None else str(value).lower()
            yield f"{section}.{name}={text}"
