"""What is in flight: prompts that were drawn and not trained on yet, with their samples.

Owns how many prompts may be in flight (the gate), which of them sampling waits for, and which a step takes. It counts
steps and groups, and knows no clock: a run with the same config and seed takes the same groups, however long anything
took. What is known of every prompt is the same on all ranks between two steps; its samples are on the ranks of the
replica that has them.

Each step takes `batch_size` groups that are whole. When v steps are done and their weights sample, at most
(`lead` + v + 1) x `batch_size` prompts were drawn, those that were taken included. Two orders:

- of the prompts (`Schedule.in_order`): a step takes the first ones, and sampling waits for them. So no token is more
  than `lead` steps old.
- of their ends (`rollout.over_sample_rate`): `extra` prompts beyond a batch are begun, and sampling stops once a batch
  is whole. A group that would become older than `max_age` steps is waited for, or begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mrl.parallel_layout import Grid
from mrl.rollout.async_schedule import Schedule
from mrl.rollout.buffer_tally import Taken, Tally
from mrl.rollout.length_bias import Acceptance, sizes_of
from mrl.types import Begun, Prompt, Rollout, SampleTable


@dataclass
class Group:
    """A prompt in flight.

    Attributes:
        uid: Of the prompt.
        source: File or task that it came from, and the row.
        data_source: Its data set.
        born: Steps in the weights that sampled its first token; None: none is sampled.
        place: Which group it was to become whole in this run; None: it is not whole.
        replica: Which has its samples; None: no samples are kept.
        restarted: It became too old once, and began again.
        num_samples: Its samples with a token.
        num_tokens: Theirs.
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

    def sampled_by(self, steps: int, replica: int, num_samples: int, num_tokens: int) -> None:
        """Weights of so many steps have sampled for it on that replica, maybe not the first ones; what it has now."""
        self.born = steps if self.born is None else self.born
        self.replica, self.num_samples, self.num_tokens = replica, num_samples, num_tokens

    def begin_again(self) -> None:
        """It has no samples any more."""
        self.born = self.place = self.replica = None
        self.num_samples = self.num_tokens = 0


class InFlight:
    """Of a run; every rank holds one.

    Attributes:
        schedule: Of the config.
        tally: Since the last `take`.
        acceptance: What was taken and what began, by length.
        rollouts: By uid the whole responses that this rank's replica has, scored once their group is whole.
        begun: By uid the responses that go on, of this rank's replica.
    """

    def __init__(self, schedule: Schedule, prompt_at: Callable[[int], Prompt]) -> None:
        """Args: prompt_at: The prompt with a uid, for what comes out of a commit."""
        self.schedule = schedule
        self.tally = Tally()
        self.acceptance = Acceptance()
        self.rollouts: dict[int, list[Rollout]] = {}
        self.begun: dict[int, list[Begun]] = {}
        self._groups: dict[int, Group] = {}
        self._whole: SampleTable | None = None
        self._prompts: dict[int, Prompt] = {}
        self._prompt_at = prompt_at
        self._num_whole = 0
        self._steps_of: dict[int, int] = {}
        self._rejected: list[Rollout] = []
        self._last: SampleTable | None = None

    @property
    def outlives_steps(self) -> bool:
        """Whether there is anything to keep between steps."""
        return self.schedule.is_off_policy or bool(self._groups)

    # the gate ---------------------------------------------------------------------------------------------------------

    def room(self, step: int, *, beside: bool) -> int:
        """Prompts that may be drawn now.

        Args:
            step: The next one that takes groups.
            beside: The updates of the step before it run meanwhile.
        """
        return max(0, self._most(step, beside) - len(self._groups))

    def _most(self, step: int, beside: bool) -> int:
        """Prompts that may be in flight."""
        plan = self.schedule
        most = plan.most_in_flight - beside * plan.batch_size
        if plan.num_steps is not None:
            most = min(most, (plan.num_steps - step + 1) * plan.batch_size + plan.extra)
        return most

    def draw(self, prompts: Iterable[Prompt]) -> None:
        """These are in flight from now on."""
        for prompt in prompts:
            self._groups[prompt.uid] = Group(prompt.uid, prompt.source, prompt.data_source)
            self._prompts[prompt.uid] = prompt

    def first(self, position: int) -> int:
        """Where the stream's first prompt is that was not trained on; `position`: of the next one to be drawn."""
        return min(self._groups, default=position)

    def prompt(self, uid: int) -> Prompt:
        """Of a group in flight, or of one that was just taken."""
        return self._prompts.get(uid) or self._prompt_at(uid)

    # sampling ---------------------------------------------------------------------------------------------------------

    @property
    def missing(self) -> int:
        """Groups that a step lacks."""
        plan, groups = self.schedule, list(self._groups.values())
        whole = groups[: plan.batch_size] if plan.in_order else groups
        return max(0, plan.batch_size - sum(group.place is not None for group in whole))

    def unfinished(self, step: int, *, beside: bool) -> list[Group]:
        """What may be sampled now, in the order in which it was drawn; see `room`."""
        groups = list(self._groups.values())[: self._most(step, beside)]
        return [group for group in groups if group.place is None]

    def enough(self, just_whole: Collection[int], step: int, *, ahead: bool) -> bool:
        """Whether sampling may stop.

        Args:
            just_whole: Groups that became whole since it began, by uid.
            step: The next one that takes groups.
            ahead: It runs beside an update: more than this step's are to become whole (`Schedule.stock`, `pace`).
        """
        plan = self.schedule
        left = [one for one in self._groups.values() if one.place is None and one.uid not in just_whole]
        if not left:
            return True
        if plan.in_order:
            awaited = list(self._groups)[: plan.batch_size]
            if any(group.uid in awaited for group in left):
                return False
            num_whole = len(self._groups) - len(left)
            return not ahead or (len(just_whole) >= plan.pace and num_whole >= plan.stock)
        if len(self._groups) - len(left) < plan.batch_size:
            return False
        return not any(self._must_go(group, step) for group in left)

    def age(self, step: int) -> None:
        """Before sampling for `step`: what it could not take any more begins again, or is waited for."""
        plan, restarted = self.schedule, set[int]()
        for group in self._groups.values():
            too_old = plan.max_age is not None and group.born is not None and step - 1 - group.born > plan.max_age
            if too_old and not plan.waits and not group.restarted:
                self.acceptance.discards(group.num_samples, group.num_tokens)
                group.begin_again()
                group.restarted = True
                self.tally.restarted += 1
                self.rollouts.pop(group.uid, None)
                self.begun.pop(group.uid, None)
                restarted.add(group.uid)
        self._split_off(restarted)

    def _is_due(self, group: Group, step: int) -> bool:
        """Whether no step after this one could take it, where it is sampled for this one at the latest."""
        most, born = self.schedule.max_age, step - 1 if group.born is None else group.born
        return most is not None and step - 1 - born >= most

    def _must_go(self, group: Group, step: int) -> bool:
        """Whether this step is to take it: it is due, and does not begin again."""
        return self._is_due(group, step) and (self.schedule.waits or group.restarted)

    def became_whole(
        self,
        uids: Sequence[int],
        rollouts: Iterable[Rollout],
        table: SampleTable,
        teaching: SampleTable,
        steps: int,
        grid: Grid,
    ) -> None:
        """Sampling has ended, and groups are whole.

        Args:
            uids: Theirs, in the order in which they became it.
            rollouts: Their samples on this rank's replica, scored.
            table: All their samples.
            teaching: Those to learn from; a group without any is dropped.
            steps: In the weights that sampled.
            grid: Who sits where.
        """
        kept = set(teaching["uid"].long().tolist())
        holder = dict(zip(table["uid"].long().tolist(), table["rank"].long().tolist(), strict=True))
        sizes = sizes_of(table)
        for uid in uids:
            self.rollouts.pop(uid, None)
        for rollout in rollouts:
            self.rollouts.setdefault(rollout.prompt.uid, []).append(rollout)
        self._last, self._rejected = table, []
        self.tally.rounds += 1
        for uid in uids:
            group = self._groups[uid]
            self.tally.whole.append((uid, group.source, group.data_source))
            if uid in kept:
                group.place, self._num_whole = self._num_whole, self._num_whole + 1
                group.sampled_by(steps, grid.replica(holder[uid]), *sizes[uid])
            else:
                self._forget(uid)
                self._rejected += self.rollouts.pop(uid, [])
                self.tally.dropped += 1
        if kept:
            self._whole = _joined(self._whole, _of_prompts(teaching, kept))
        self.tally.drawn = _joined(self.tally.drawn, table)

    def held(self, uid: int) -> tuple[int, int]:
        """Samples of a group on this rank's replica, and their tokens."""
        lens = [len(one.response_ids) for one in (*self.begun.get(uid, ()), *self.rollouts.get(uid, ()))]
        return len(lens), sum(lens)

    def stopped(self, held: Iterable[Sequence[int]], steps: int) -> None:
        """Sampling has ended with samples of groups that are not whole.

        Args:
            held: (uid, replica that has them, samples, their tokens).
            steps: In the weights that sampled.
        """
        for uid, replica, num_samples, num_tokens in held:
            self._groups[uid].sampled_by(steps, replica, num_samples, num_tokens)

    # training ---------------------------------------------------------------------------------------------------------

    def take(self, step: int) -> Taken:
        """The groups that `step` trains on, which leave; where there is nothing to learn from, what came last.

        Raises:
            RuntimeError: Nothing was sampled.
        """
        plan, tally, last = self.schedule, self.tally, self._last
        if last is None:
            raise RuntimeError(f"step {step} has nothing to train on: nothing was sampled")
        whole = [(group.place, group) for group in self._groups.values() if group.place is not None]
        if not plan.in_order:
            whole.sort(key=lambda each: (not self._must_go(each[1], step), not self._is_due(each[1], step), each[0]))
        taken = [group for _, group in whole[: plan.batch_size]]
        rollouts, table = [*self._rejected], self._split_off({group.uid for group in taken})
        for group in taken:
            rollouts += self.rollouts.pop(group.uid, [])
            self._forget(group.uid)
        if table is not None:
            at_once = {group.uid for group in taken if group.born == step - 1 and not group.restarted}
            at_once_N = torch.tensor([int(uid) in at_once for uid in table["uid"].tolist()])
            self.acceptance.took(*_size(taken), table["response_len"], at_once_N)
        self.tally, self._rejected = Tally(), []
        return Taken(
            rollouts,
            last.scored if table is None else table,
            {group.uid: group.data_source for group in taken} if taken else tally.names,
            tally,
            sum(group.born is not None for group in self._groups.values()),
            _size(self._groups.values()),
        )

    def _split_off(self, uids: Set[int]) -> SampleTable | None:
        """The rows of these prompts, which leave the table of what is whole."""
        if self._whole is None or not uids:
            return None
        held = {int(uid) for uid in self._whole["uid"].tolist()}
        found, left = _of_prompts(self._whole, uids), held - uids
        self._whole = _of_prompts(self._whole, left) if left else None
        return found

    def _forget(self, uid: int) -> None:
        del self._groups[uid]
        self._prompts.pop(uid, None)

    # versions ---------------------------------------------------------------------------------------------------------

    def sampled_by(self, policy_version: int, steps: int) -> None:
        """The engine's weights have this version, and so many steps are in them."""
        self._steps_of[policy_version] = steps
        oldest = min((group.born for group in self._groups.values() if group.born is not None), default=steps)
        self._steps_of = {version: done for version, done in self._steps_of.items() if done >= oldest}

    def age_of(self, policy_version: int, *, step: int) -> int:
        """How many steps older than those that `step` trains the weights of this version are."""
        return step - 1 - self._steps_of[policy_version]

    def check_age(self, worst: float) -> None:
        """Raises RuntimeError where a step takes a token that is older than it may be; `worst`: its age, steps."""
        most = self.schedule.max_age
        if most is not None and worst > most:
            raise RuntimeError(
                f"a token that is to be trained is {worst:.0f} steps old, train.max_off_policy_steps allows {most}: "
                "the schedule of sampling is broken"
            )

    # between ranks, and in commits ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: all but samples and tables."""
        tally = {name: value for name, value in vars(self.tally).items() if name != "drawn"}
        held = [table for table in (self._whole, self._last) if table is not None]
        turns = {key: list(rewards) for table in held for key, rewards in table.turn_rewards.items()}
        return {
            "schedule": asdict(replace(self.schedule, num_steps=None)),
            "groups": [asdict(group) for group in self._groups.values()],
            "num_whole": self._num_whole,
            "steps_of": sorted(self._steps_of.items()),
            "acceptance": self.acceptance.state_dict(),
            "turn_rewards": [[*key, rewards] for key, rewards in turns.items()],
            "tally": tally,
        }

    def tables(self) -> tuple[tuple[str, ...], dict[str, Tensor]]:
        """Columns, and rows of what is whole (`rows`), of the tally (`drawn`) and of what came last (`last`)."""
        if self._last is None:
            return (), {}
        found = {"last": self._last.rows_NC}
        if self._whole is not None:
            found["rows"] = self._whole.rows_NC
        if self.tally.drawn is not None:
            found["drawn"] = self.tally.drawn.rows_NC
        return self._last.columns, found

    def samples(self) -> tuple[list[Rollout], list[Begun]]:
        """What this rank holds."""
        rollouts = [one for found in self.rollouts.values() for one in found]
        return rollouts, [one for found in self.begun.values() for one in found]

    def hold(self, rollouts: Iterable[Rollout], begun: Iterable[Begun], rank_of: Mapping[int, int]) -> None:
        """What this rank holds from now on, after a `follow`.

        Args:
            rollouts: Whole responses.
            begun: Responses that go on.
            rank_of: First rank of each replica; what replica k had, replica k modulo their number has.
        """
        self.rollouts, self.begun = {}, {}
        for whole in rollouts:
            self.rollouts.setdefault(whole.prompt.uid, []).append(whole)
        for one in begun:
            self.begun.setdefault(one.prompt.uid, []).append(one)
        holder = dict[int, int]()
        for group in self._groups.values():
            if group.replica is not None:
                group.replica %= len(rank_of)
                holder[group.uid] = rank_of[group.replica]
        if self._whole is not None:
            self._whole["rank"][:] = torch.tensor([holder[int(uid)] for uid in self._whole["uid"].tolist()])

    def begin_again(self) -> None:
        """All prompts in flight are sampled from the start: what they had does not fit the run any more."""
        for group in self._groups.values():
            group.begin_again()
        self.rollouts, self.begun = {}, {}
        self.tally, self._whole, self._last = Tally(), None, None
        self.acceptance = Acceptance()

    def follow(self, state: Mapping[str, Any], columns: Sequence[str], tables: Mapping[str, Tensor]) -> None:
        """Takes over what `state_dict` and `tables` gave, here or on another rank; samples stay as they are."""
        self._groups = {item["uid"]: Group(**item) for item in state["groups"]}
        self._num_whole = int(state["num_whole"])
        self.acceptance = Acceptance.of(state["acceptance"])
        self._steps_of = {int(version): int(steps) for version, steps in state["steps_of"]}
        self.tally = Tally(**state["tally"])
        self.tally.whole = [(int(uid), str(source), str(name)) for uid, source, name in self.tally.whole]
        turns = {(int(uid), int(sample)): list(rewards) for uid, sample, rewards in state["turn_rewards"]}
        named = {name: SampleTable(tuple(columns), rows, turns) for name, rows in tables.items()}
        self._last, self.tally.drawn = named.get("last"), named.get("drawn")
        rows = named.get("rows")
        self._whole = None if rows is None else _of_prompts(rows, set(rows["uid"].long().tolist()))


def _size(groups: Iterable[Group]) -> tuple[int, int]:
    """Samples with a token, and their tokens."""
    sizes = [(group.num_samples, group.num_tokens) for group in groups]
    return sum(count for count, _ in sizes), sum(tokens for _, tokens in sizes)


def _joined(table: SampleTable | None, new: SampleTable) -> SampleTable:
    return new if table is None else SampleTable.join([table, new])


def _of_prompts(table: SampleTable, uids: Set[int]) -> SampleTable:
    """The rows of these prompts, and what their turns were given; it looks at each once."""
    turns = {key: rewards for key, rewards in table.turn_rewards.items() if key[0] in uids}
    mask_N = torch.isin(table["uid"].long(), torch.tensor(list(uids), dtype=torch.int64))
    if mask_N.all() and len(turns) == len(table.turn_rewards):
        return table
    return SampleTable(table.columns, table.rows_NC[mask_N], turns)
