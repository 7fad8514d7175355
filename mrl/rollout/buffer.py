"""Rollout buffer: prompts drawn from the data that no step has trained on yet, with their samples.

A group is a prompt with its `rollout.n` samples. It is pending (no token sampled), partial (some samples unfinished) or
complete (all samples finished and scored). Each step consumes `batch_size` complete groups. `lead`, `extra` and
`max_age` are attributes of `RolloutSchedule`:

- `RolloutSchedule.in_order`: in prompt order. Sampling waits for the next batch, so no token is more than `lead` steps
  old.
- with `rollout.over_sample_rate`: in order of completion. `extra` prompts beyond a batch are sampled, and sampling
  stops when a batch is complete. A group that would become older than `max_age` steps is waited for, or restarted.

When sampling uses the weights of v training steps, at most (v + 1 + `lead`) x `batch_size` + `extra` prompts have been
drawn, consumed ones included. All decisions count steps and groups and read no clock: the same config and seed give the
same batches whatever the timing.

Calls for one step: `record_policy_version` after the weight sync; `restart_too_old`; then until enough groups are
complete: `draw`, `unfinished`, sampling, `mark_partial` (partial groups) and `complete` (complete groups); finally
`take`.

Group metadata is the same on all ranks between two steps. Samples are on the ranks of the replica that generated them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mrl.parallel_layout import ParallelLayout
from mrl.rollout.async_schedule import RolloutSchedule
from mrl.rollout.length_bias import Acceptance, sizes_of
from mrl.types import PartialRollout, Prompt, Rollout, SampleTable


@dataclass
class PromptGroup:
    """Metadata of a prompt in the buffer.

    Attributes:
        uid: `Prompt.uid`.
        source: File or task, and row number, of the prompt.
        data_source: Name of the data set.
        born: Training steps done by the weights that sampled the first token; None while pending.
        place: Completion order: rank of this group among all completed groups of the run; None until complete.
        replica: Index of the rollout replica that stores the samples; None while pending.
        restarted: True after the group exceeded `RolloutSchedule.max_age` once and lost its samples.
        num_samples: Samples with at least one token.
        num_tokens: Response tokens of these samples.
    """

    uid: int
    source: str
    data_source: str
    born: int | None = None
    place: int | None = None
    replica: int | None = None
    restarted: bool = False
    num_samples: int = 0
    num_tokens: int = 0

    def record_sampling(self, steps: int, replica: int, num_samples: int, num_tokens: int) -> None:
        """Records that weights of `steps` training steps sampled for the group, and the size of its samples now."""
        self.born = steps if self.born is None else self.born
        self.replica, self.num_samples, self.num_tokens = replica, num_samples, num_tokens

    def reset(self) -> None:
        """Returns the group to pending."""
        self.born = self.place = self.replica = None
        self.num_samples = self.num_tokens = 0


@dataclass
class SamplingTally:
    """Counters of the sampling since the last `RolloutBuffer.take`; JSON-serializable except for `drawn`.

    Attributes:
        rounds: Number of sampling rounds.
        dropped: Groups that dynamic sampling dropped.
        restarted: Groups that exceeded the maximum age.
        whole: (uid, source, data set) of each completed prompt.
        notes: Log lines, such as warnings of the scorer.
        drawn: Table of all samples of the completed prompts, unscored and dropped ones included; None: no samples.
    """

    rounds: int = 0
    dropped: int = 0
    restarted: int = 0
    whole: list[tuple[int, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    drawn: SampleTable | None = None

    @property
    def sources(self) -> dict[int, str]:
        """`Prompt.source` of each completed prompt, by uid."""
        return {uid: source for uid, source, _ in self.whole}

    @property
    def names(self) -> dict[int, str]:
        """Data set of each completed prompt, by uid."""
        return {uid: name for uid, _, name in self.whole}


@dataclass(frozen=True)
class ConsumedGroups:
    """Samples that one step consumes.

    Attributes:
        rollouts: Samples on this rank's replica; may include some that are not in `table`.
        table: Table of all samples to train on.
        names: Data set by prompt uid.
        tally: Sampling counters since the previous step.
        num_carried: Groups with samples that stay in the buffer.
        carried: (samples, response tokens) that stay in the buffer.
    """

    rollouts: list[Rollout]
    table: SampleTable
    names: dict[int, str]
    tally: SamplingTally
    num_carried: int
    carried: tuple[int, int]


class RolloutBuffer:
    """Rollout buffer of the run; every rank has one. The module's docstring has the order of calls.

    Attributes:
        schedule: Limits on how far sampling runs ahead.
        tally: Sampling counters since the last `take`.
        acceptance: Counts of consumed and discarded samples by response length.
        rollouts: Finished responses on this rank's replica, by uid; scored once their group is complete.
        partial_rollouts: Partial responses on this rank's replica, by uid.
    """

    def __init__(self, schedule: RolloutSchedule, prompt_at: Callable[[int], Prompt]) -> None:
        """Creates an empty buffer.

        Args:
            schedule: Limits on how far sampling runs ahead.
            prompt_at: Returns the prompt with a uid, for groups restored from a checkpoint.
        """
        self.schedule = schedule
        self.tally = SamplingTally()
        self.acceptance = Acceptance()
        self.rollouts: dict[int, list[Rollout]] = {}
        self.partial_rollouts: dict[int, list[PartialRollout]] = {}
        self._groups: dict[int, PromptGroup] = {}
        self._complete_rows: SampleTable | None = None
        self._prompts: dict[int, Prompt] = {}
        self._prompt_at = prompt_at
        self._num_complete = 0
        self._steps_of: dict[int, int] = {}
        self._rejected: list[Rollout] = []
        self._last_table: SampleTable | None = None

    @property
    def needs_checkpoint(self) -> bool:
        """True if a checkpoint must store the buffer's content."""
        return self.schedule.is_off_policy or bool(self._groups)

    # drawing prompts --------------------------------------------------------------------------------------------------

    def num_drawable(self, step: int, *, concurrent: bool) -> int:
        """Returns how many prompts may be drawn now.

        Args:
            step: Next step that consumes groups.
            concurrent: True while the update of `step - 1` runs concurrently.
        """
        return max(0, self._capacity(step, concurrent) - len(self._groups))

    def _capacity(self, step: int, concurrent: bool) -> int:
        """Returns how many groups the buffer may contain; fewer near the end of the run."""
        plan = self.schedule
        capacity = plan.max_in_flight - concurrent * plan.batch_size
        if plan.num_steps is not None:
            capacity = min(capacity, (plan.num_steps - step + 1) * plan.batch_size + plan.extra)
        return capacity

    def draw(self, prompts: Iterable[Prompt]) -> None:
        """Adds prompts as pending groups."""
        for prompt in prompts:
            self._groups[prompt.uid] = PromptGroup(prompt.uid, prompt.source, prompt.data_source)
            self._prompts[prompt.uid] = prompt

    def first_untrained(self, position: int) -> int:
        """Returns the smallest uid that was not trained on; `position` is the uid of the next prompt to draw."""
        return min(self._groups, default=position)

    def prompt(self, uid: int) -> Prompt:
        """Returns the prompt of a group in the buffer or of a group that was just consumed."""
        return self._prompts.get(uid) or self._prompt_at(uid)

    # sampling ---------------------------------------------------------------------------------------------------------

    @property
    def num_missing(self) -> int:
        """Number of complete groups that the next step still lacks."""
        plan, groups = self.schedule, list(self._groups.values())
        eligible = groups[: plan.batch_size] if plan.in_order else groups
        return max(0, plan.batch_size - sum(group.place is not None for group in eligible))

    def unfinished(self, step: int, *, concurrent: bool) -> list[PromptGroup]:
        """Returns the pending and partial groups that may be sampled now, in prompt order.

        Arguments are those of `num_drawable`.
        """
        groups = list(self._groups.values())[: self._capacity(step, concurrent)]
        return [group for group in groups if group.place is None]

    def may_stop(self, newly_complete: Collection[int], step: int, *, ahead: bool) -> bool:
        """Returns whether sampling may stop.

        Args:
            newly_complete: Uids of the groups completed since sampling started.
            step: Next step that consumes groups.
            ahead: True to complete also groups of later steps (`RolloutSchedule.target_complete` and
                `min_per_update`), because an update runs concurrently.
        """
        plan = self.schedule
        incomplete = [one for one in self._groups.values() if one.place is None and one.uid not in newly_complete]
        if not incomplete:
            return True
        num_complete = len(self._groups) - len(incomplete)
        if plan.in_order:
            awaited = list(self._groups)[: plan.batch_size]
            if any(group.uid in awaited for group in incomplete):
                return False
            return not ahead or (len(newly_complete) >= plan.min_per_update and num_complete >= plan.target_complete)
        if num_complete < plan.batch_size:
            return False
        return not any(self._must_consume(group, step) for group in incomplete)

    def restart_too_old(self, step: int) -> None:
        """Restarts the groups that would exceed the maximum age at `step`, unless sampling waits for them.

        A group is restarted once at most; after that sampling waits for it.
        """
        plan, restarted = self.schedule, set[int]()
        for group in self._groups.values():
            too_old = plan.max_age is not None and group.born is not None and step - 1 - group.born > plan.max_age
            if too_old and not plan.waits and not group.restarted:
                self.acceptance.record_discarded(group.num_samples, group.num_tokens)
                group.reset()
                group.restarted = True
                self.tally.restarted += 1
                self.rollouts.pop(group.uid, None)
                self.partial_rollouts.pop(group.uid, None)
                restarted.add(group.uid)
        self._pop_rows(restarted)

    def _is_due(self, group: PromptGroup, step: int) -> bool:
        """Returns whether `step` is the last one that can consume the group within the maximum age."""
        max_age, born = self.schedule.max_age, step - 1 if group.born is None else group.born
        return max_age is not None and step - 1 - born >= max_age

    def _must_consume(self, group: PromptGroup, step: int) -> bool:
        """Returns whether `step` must wait for the group: it is due and may not be restarted."""
        return self._is_due(group, step) and (self.schedule.waits or group.restarted)

    def complete(
        self,
        uids: Sequence[int],
        rollouts: Iterable[Rollout],
        table: SampleTable,
        train_table: SampleTable,
        steps: int,
        grid: ParallelLayout,
    ) -> None:
        """Marks groups as complete; drops those without a learning signal.

        Args:
            uids: Uids of the groups, in order of completion.
            rollouts: Scored samples of the groups on this rank's replica.
            table: Table of all samples of the groups.
            train_table: Rows of `table` to train on; a group without such a row is dropped.
            steps: Training steps done by the weights that sampled.
            grid: Parallel layout of the job.
        """
        kept = set(train_table["uid"].long().tolist())
        holder = dict(zip(table["uid"].long().tolist(), table["rank"].long().tolist(), strict=True))
        sizes = sizes_of(table)
        for uid in uids:
            self.rollouts.pop(uid, None)
        for rollout in rollouts:
            self.rollouts.setdefault(rollout.prompt.uid, []).append(rollout)
        self._last_table, self._rejected = table, []
        self.tally.rounds += 1
        for uid in uids:
            group = self._groups[uid]
            self.tally.whole.append((uid, group.source, group.data_source))
            if uid in kept:
                group.place, self._num_complete = self._num_complete, self._num_complete + 1
                group.record_sampling(steps, grid.replica(holder[uid]), *sizes[uid])
            else:
                self._remove(uid)
                self._rejected += self.rollouts.pop(uid, [])
                self.tally.dropped += 1
        if kept:
            self._complete_rows = _concat(self._complete_rows, _rows_of(train_table, kept))
        self.tally.drawn = _concat(self.tally.drawn, table)

    def local_size(self, uid: int) -> tuple[int, int]:
        """Returns how many samples and response tokens of a group are on this rank's replica."""
        lens = [len(one.response_ids) for one in (*self.partial_rollouts.get(uid, ()), *self.rollouts.get(uid, ()))]
        return len(lens), sum(lens)

    def mark_partial(self, held: Iterable[Sequence[int]], steps: int) -> None:
        """Marks groups as partial after sampling stopped.

        Args:
            held: (uid, replica, samples, response tokens) of each group with samples.
            steps: Training steps done by the weights that sampled.
        """
        for uid, replica, num_samples, num_tokens in held:
            self._groups[uid].record_sampling(steps, replica, num_samples, num_tokens)

    # training ---------------------------------------------------------------------------------------------------------

    def take(self, step: int) -> ConsumedGroups:
        """Removes and returns the groups that `step` trains on.

        If no group is complete, because dynamic sampling dropped all of them, the last sampled table is returned.

        Raises:
            RuntimeError: Nothing was sampled.
        """
        plan, tally, last = self.schedule, self.tally, self._last_table
        if last is None:
            raise RuntimeError(f"step {step} found no samples in the rollout buffer. Call sample() before take().")
        complete = [(group.place, group) for group in self._groups.values() if group.place is not None]
        if not plan.in_order:  # groups that no later step can consume come first, then order of completion
            complete.sort(
                key=lambda each: (not self._must_consume(each[1], step), not self._is_due(each[1], step), each[0])
            )
        taken = [group for _, group in complete[: plan.batch_size]]
        rollouts, table = [*self._rejected], self._pop_rows({group.uid for group in taken})
        for group in taken:
            rollouts += self.rollouts.pop(group.uid, [])
            self._remove(group.uid)
        if table is not None:
            at_once = {group.uid for group in taken if group.born == step - 1 and not group.restarted}
            at_once_N = torch.tensor([int(uid) in at_once for uid in table["uid"].tolist()])
            self.acceptance.record_consumed(*_sum_sizes(taken), table["response_len"], at_once_N)
        self.tally, self._rejected = SamplingTally(), []
        return ConsumedGroups(
            rollouts,
            last.scored if table is None else table,
            {group.uid: group.data_source for group in taken} if taken else tally.names,
            tally,
            sum(group.born is not None for group in self._groups.values()),
            _sum_sizes(self._groups.values()),
        )

    def _pop_rows(self, uids: Set[int]) -> SampleTable | None:
        """Removes the rows of these prompts from the table of complete groups and returns them."""
        if self._complete_rows is None or not uids:
            return None
        removed = _rows_of(self._complete_rows, uids)
        left = {int(uid) for uid in self._complete_rows["uid"].tolist()} - uids
        self._complete_rows = _rows_of(self._complete_rows, left) if left else None
        return removed

    def _remove(self, uid: int) -> None:
        del self._groups[uid]
        self._prompts.pop(uid, None)

    # policy versions --------------------------------------------------------------------------------------------------

    def record_policy_version(self, policy_version: int, steps: int) -> None:
        """Records that the engine's weights have this version and are the result of `steps` training steps."""
        self._steps_of[policy_version] = steps
        oldest = min((group.born for group in self._groups.values() if group.born is not None), default=steps)
        self._steps_of = {version: done for version, done in self._steps_of.items() if done >= oldest}

    def age_of(self, policy_version: int, *, step: int) -> int:
        """Returns the age of a policy version at `step`: training steps between it and the weights being updated."""
        return step - 1 - self._steps_of[policy_version]

    def check_age(self, oldest: float) -> None:
        """Raises RuntimeError if the oldest token of a batch, `oldest` steps old, exceeds the maximum age."""
        max_age = self.schedule.max_age
        if max_age is not None and oldest > max_age:
            raise RuntimeError(
                f"The batch contains a token that is {oldest:.0f} steps old, but train.max_off_policy_steps allows "
                f"{max_age}. This is a bug in the sampling schedule; please report it."
            )

    # broadcast to other ranks, and checkpoints ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the JSON-serializable state, without samples and tables."""
        tally = {name: value for name, value in vars(self.tally).items() if name != "drawn"}
        held = [table for table in (self._complete_rows, self._last_table) if table is not None]
        turns = {key: list(rewards) for table in held for key, rewards in table.turn_rewards.items()}
        return {
            "schedule": asdict(replace(self.schedule, num_steps=None)),
            "groups": [asdict(group) for group in self._groups.values()],
            "num_whole": self._num_complete,
            "steps_of": sorted(self._steps_of.items()),
            "acceptance": self.acceptance.state_dict(),
            "turn_rewards": [[*key, rewards] for key, rewards in turns.items()],
            "tally": tally,
        }

    def tables(self) -> tuple[tuple[str, ...], dict[str, Tensor]]:
        """Returns column names, and the rows of complete groups (`rows`), `tally.drawn` (`drawn`) and the last call."""
        if self._last_table is None:
            return (), {}
        found = {"last": self._last_table.rows_NC}
        if self._complete_rows is not None:
            found["rows"] = self._complete_rows.rows_NC
        if self.tally.drawn is not None:
            found["drawn"] = self.tally.drawn.rows_NC
        return self._last_table.columns, found

    def samples(self) -> tuple[list[Rollout], list[PartialRollout]]:
        """Returns the finished and the partial responses that this rank stores."""
        rollouts = [one for found in self.rollouts.values() for one in found]
        return rollouts, [one for found in self.partial_rollouts.values() for one in found]

    def replace_samples(
        self, rollouts: Iterable[Rollout], partials: Iterable[PartialRollout], rank_of: Mapping[int, int]
    ) -> None:
        """Replaces the samples that this rank stores, after a `load_state`.

        Args:
            rollouts: Finished responses.
            partials: Partial responses.
            rank_of: First rank of each replica. Groups of replica k move to replica k modulo the number of replicas.
        """
        self.rollouts, self.partial_rollouts = {}, {}
        for rollout in rollouts:
            self.rollouts.setdefault(rollout.prompt.uid, []).append(rollout)
        for partial in partials:
            self.partial_rollouts.setdefault(partial.prompt.uid, []).append(partial)
        rank_of_group = dict[int, int]()
        for group in self._groups.values():
            if group.replica is not None:
                group.replica %= len(rank_of)
                rank_of_group[group.uid] = rank_of[group.replica]
        if self._complete_rows is not None:
            ranks = [rank_of_group[int(uid)] for uid in self._complete_rows["uid"].tolist()]
            self._complete_rows["rank"][:] = torch.tensor(ranks)

    def restart_all(self) -> None:
        """Discards all samples and returns all groups to pending."""
        for group in self._groups.values():
            group.reset()
        self.rollouts, self.partial_rollouts = {}, {}
        self.tally, self._complete_rows, self._last_table = SamplingTally(), None, None
        self.acceptance = Acceptance()

    def load_state(self, state: Mapping[str, Any], columns: Sequence[str], tables: Mapping[str, Tensor]) -> None:
        """Loads the results of `state_dict` and `tables`, of a checkpoint or another rank; keeps the samples."""
        self._groups = {item["uid"]: PromptGroup(**item) for item in state["groups"]}
        self._num_complete = int(state["num_whole"])
        self.acceptance = Acceptance.of(state["acceptance"])
        self._steps_of = {int(version): int(steps) for version, steps in state["steps_of"]}
        self.tally = SamplingTally(**state["tally"])
        self.tally.whole = [(int(uid), str(source), str(name)) for uid, source, name in self.tally.whole]
        turns = {(int(uid), int(sample)): list(rewards) for uid, sample, rewards in state["turn_rewards"]}
        named = {name: SampleTable(tuple(columns), rows, turns) for name, rows in tables.items()}
        self._last_table, self.tally.drawn = named.get("last"), named.get("drawn")
        rows = named.get("rows")
        self._complete_rows = None if rows is None else _rows_of(rows, set(rows["uid"].long().tolist()))


def _sum_sizes(groups: Iterable[PromptGroup]) -> tuple[int, int]:
    """Returns the total number of samples with a token, and of their tokens."""
    sizes = [(group.num_samples, group.num_tokens) for group in groups]
    return sum(count for count, _ in sizes), sum(tokens for _, tokens in sizes)


def _concat(table: SampleTable | None, new: SampleTable) -> SampleTable:
    return new if table is None else SampleTable.join([table, new])


def _rows_of(table: SampleTable, uids: Set[int]) -> SampleTable:
    """Returns the rows and turn rewards of these prompts."""
    turns = {key: rewards for key, rewards in table.turn_rewards.items() if key[0] in uids}
    mask_N = torch.isin(table["uid"].long(), torch.tensor(list(uids), dtype=torch.int64))
    if mask_N.all() and len(turns) == len(table.turn_rewards):
        return table
    return SampleTable(table.columns, table.rows_NC[mask_N], turns)
