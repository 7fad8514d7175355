"""Assignment of prompts to rollout replicas, balanced by the response lengths seen so far.

The assignment changes the speed only: the sampled tokens do not depend on the replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist

from mrl.data.packing import balance
from mrl.distributed.collectives import all_gather_ragged
from mrl.distributed.groups import ProcessGroups
from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.rollout.sampling_progress import SamplingProgress
from mrl.types import Prompt, Rollout, SampleTable

Converse = Callable[[RolloutEngine, Sequence[Prompt], SamplingConfig], list[Rollout]]

HISTORY_LIMIT = 200_000
"""Maximum number of data rows in a `LengthHistory`; the oldest entries are removed."""


class LengthHistory:
    """Mean response length of each data row seen so far; equal on every rank.

    Prompts with long expected responses start first and are spread over the replicas.
    """

    def __init__(self, default_length: float) -> None:
        self._default = default_length
        self._lengths: dict[str, float] = {}

    def expected(self, source: str) -> float:
        """Returns the expected response length of a data row in tokens: its last mean, or the last step's mean."""
        return self._lengths.get(source, self._default)

    def update(self, sources: Mapping[int, str], table: SampleTable) -> None:
        """Updates the history with a step's samples; `sources` maps uid to `Prompt.source`."""
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
        """Returns the history, JSON-serializable."""
        return {"default": self._default, "lengths": dict(self._lengths)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Loads the result of `state_dict`."""
        self._default = float(state["default"])  # type: ignore[arg-type]
        self._lengths = dict(state["lengths"])  # type: ignore[call-overload]


def assign(prompts: Sequence[Prompt], num_replicas: int, samples: int, history: LengthHistory) -> list[list[Prompt]]:
    """Returns the prompts of each replica, with balanced expected tokens and the longest first within a replica."""
    costs = [len(prompt.prompt_ids) + samples * history.expected(prompt.source) for prompt in prompts]
    bins = balance([round(cost) for cost in costs], num_replicas)
    return [[prompts[i] for i in sorted(rows, key=lambda i: (-costs[i], prompts[i].uid))] for rows in bins]


def drop_incomplete_groups(
    rollouts: Sequence[Rollout], num_samples: int, over: dist.ProcessGroup
) -> tuple[list[Rollout], set[int]]:
    """Collective over `over`: drops the samples of incomplete groups, which exist after a stop request.

    Args:
        rollouts: Samples of this replica, the same on all its ranks.
        num_samples: Samples in a complete group.
        over: Process group that contains at least all ranks that sample.

    Returns:
        Samples of complete groups on this replica, and the uids of the complete groups of all replicas.
    """
    counts = Counter(rollout.prompt.uid for rollout in rollouts)
    complete = sorted(uid for uid, count in counts.items() if count == num_samples)
    uids = set(all_gather_ragged(torch.tensor(complete, dtype=torch.int64), over).tolist())
    return [rollout for rollout in rollouts if rollout.prompt.uid in uids], uids


def generate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    groups: ProcessGroups,
    history: LengthHistory,
    run_episodes: Converse | None = None,
    progress: SamplingProgress | None = None,
) -> list[Rollout]:
    """Collective over each replica: samples this replica's share of the prompts.

    All ranks pass the same prompts. Ranks of a replica return the same rollouts, ranks that do not sample return none.
    With `run_episodes` each sample is a multi-turn episode. `progress` receives the share before the engine calls
    `on_sampled`.
    """
    if not groups.is_sampler:
        return []
    num_replicas, replica = groups.grid.num_replicas, groups.grid.replica(groups.rank)
    own = assign(prompts, num_replicas, sampling.n, history)[replica]
    if not own:
        return []
    expected = sampling.n * sum(min(history.expected(prompt.source), sampling.max_tokens) for prompt in own)
    where = f" (replica {replica + 1} of {num_replicas})" if num_replicas > 1 else ""
    # in rounds of `generate`, a finished sample is a turn and not an episode
    in_rounds = run_episodes is not None and type(engine).generate_multi_turn is RolloutEngine.generate_multi_turn
    with nullcontext() if progress is None or in_rounds else progress.of(len(own), sampling.n, expected, where):
        return engine.generate(own, sampling) if run_episodes is None else run_episodes(engine, own, sampling)
