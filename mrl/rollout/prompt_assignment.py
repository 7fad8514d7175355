"""Who samples: prompts spread over the engine's replicas.

Owns which replica samples a prompt (`assign`), by the response lengths seen so far (`LengthHistory`). What is sampled
does not depend on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from mrl.data.packing import balance
from mrl.distributed.collectives import all_gather_ragged
from mrl.distributed.groups import ProcessGroups
from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.types import Prompt, Rollout, SampleTable

Converse = Callable[[RolloutEngine, Sequence[Prompt], SamplingConfig], list[Rollout]]

HISTORY_LIMIT = 200_000
"""Data rows whose response length is remembered; the oldest are forgotten."""


class LengthHistory:
    """Mean response length of each data row seen so far: long answers start first and spread over the replicas.

    Every rank keeps the same history, since each is fed from the same table.
    """

    def __init__(self, default_length: float) -> None:
        self._default = default_length
        self._lengths: dict[str, float] = {}

    def expected(self, source: str) -> float:
        """Tokens that a response to the prompt of this data row is expected to have."""
        return self._lengths.get(source, self._default)

    def update(self, sources: Mapping[int, str], table: SampleTable) -> None:
        """Takes in the lengths of a step's samples; `sources`: uid -> row of the data."""
        by_uid: dict[int, list[float]] = {}
        for uid, length in zip(table["uid"].tolist(), table["response_len"].tolist(), strict=True):
            by_uid.setdefault(int(uid), []).append(length)
        for uid, source in sources.items():
            lengths = by_uid.get(uid)
            if lengths:
                self._lengths.pop(source, None)
                self._lengths[source] = sum(lengths) / len(lengths)
        if by_uid:
            self._default = sum(map(sum, by_uid.values())) / sum(map(len, by_uid.values()))
        while len(self._lengths) > HISTORY_LIMIT:
            del self._lengths[next(iter(self._lengths))]

    def state_dict(self) -> dict[str, object]:
        """JSON-able state."""
        return {"default": self._default, "lengths": dict(self._lengths)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Takes back what `state_dict` gave."""
        self._default = float(state["default"])  # type: ignore[arg-type]
        self._lengths = dict(state["lengths"])  # type: ignore[call-overload]


def assign(prompts: Sequence[Prompt], num_replicas: int, samples: int, history: LengthHistory) -> list[list[Prompt]]:
    """Prompts of each replica: expected tokens are balanced, and within a replica the longest start first."""
    costs = [len(prompt.prompt_ids) + samples * history.expected(prompt.source) for prompt in prompts]
    bins = balance([round(cost) for cost in costs], num_replicas)
    return [[prompts[i] for i in sorted(rows, key=lambda i: (-costs[i], prompts[i].uid))] for rows in bins]


def whole_prompts(
    rollouts: Sequence[Rollout], num_samples: int, over: dist.ProcessGroup
) -> tuple[list[Rollout], set[int]]:
    """Collective over `over`: the rollouts of this replica whose prompts have all samples, and all these prompts' uids.

    Args:
        rollouts: Of this replica, the same on its ranks.
        num_samples: Of each prompt.
        over: The ranks that sample, at least.
    """
    counts = Counter(rollout.prompt.uid for rollout in rollouts)
    mine = sorted(uid for uid, count in counts.items() if count == num_samples)
    uids = set(all_gather_ragged(torch.tensor(mine, dtype=torch.int64), over).tolist())
    return [rollout for rollout in rollouts if rollout.prompt.uid in uids], uids


def generate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    groups: ProcessGroups,
    history: LengthHistory,
    converse: Converse | None = None,
) -> list[Rollout]:
    """Collective over the job: the rollouts of this rank's replica for its part of the prompts.

    All ranks pass the same prompts. The ranks of one replica get the same rollouts; `converse` makes episodes of them.
    Ranks that do not sample get none.
    """
    if not groups.samples:
        return []
    mine = assign(prompts, groups.grid.num_replicas, sampling.n, history)[groups.grid.replica(groups.rank)]
    if not mine:
        return []
    return engine.generate(mine, sampling) if converse is None else converse(engine, mine, sampling)
