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

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from mrl.data.schedule import Schedule
from mrl.grid import Grid
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
    """

    uid: int
    source: str
    data_source: str
    born: int | None = None
    place: int | None = None
    replica: int | None = None
    restarted: bool = False

    def sampled_by(self, steps: int, replica: int) -> None:
        """Weights of so many steps have sampled for it on that replica, maybe not the first ones."""
        self.born = steps if self.born is None else self.born
        self.replica = replica

    def begin_again(self) -> None:
        """It has no samples any more."""
        self.born = self.place = self.replica = None


@dataclass
class Tally:
    """What sampling did since a step last took its groups; JSON-able but for the table.

    Attributes:
        rounds: Times that it ran.
        dropped: Groups with nothing to learn from.
        restarted: Groups that were too old.
        whole: (uid, source, data set) of each prompt that became whole.
        notes: What people should hear.
        drawn: The table of these prompts, samples without a score too; None: there are none.
    """

    rounds: int = 0
    dropped: int = 0
    restarted: int = 0
    whole: list[tuple[int, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    drawn: SampleTable | None = None

    @property
    def sources(self) -> dict[int, str]:
        """Where each prompt came from, by uid."""
        return {uid: source for uid, source, _ in self.whole}

    @property
    def names(self) -> dict[int, str]:
        """The data set of each prompt, by uid."""
        return {uid: name for uid, _, name in self.whole}


@dataclass(frozen=True)
class Taken:
    """What a step trains on.

    Attributes:
        rollouts: Samples that this rank's replica has, maybe some that are not in the table.
        table: All samples.
        names: uid -> data set.
        tally: Of the time since the step before.
        num_carried: Groups that stay in flight with samples.
    """

    rollouts: list[Rollout]
    table: SampleTable
    names: dict[int, str]
    tally: Tally
    num_carried: int


class InFlight:
    """Of a run; every rank holds one.

    Attributes:
        schedule: Of the config.
        tally: Since the last `take`.
        rollouts: By uid the whole responses that this rank's replica has, scored once their group is whole.
        begun: By uid the responses that go on, of this rank's replica.
    """

    def __init__(self, schedule: Schedule, prompt_at: Callable[[int], Prompt]) -> None:
        """Args: prompt_at: The prompt with a uid, for what comes out of a commit."""
        self.schedule = schedule
        self.tally = Tally()
        self.rollouts: dict[int, list[Rollout]] = {}
        self.begun: dict[int, list[Begun]] = {}
        self._groups: dict[int, Group] = {}
        self._tables: dict[int, SampleTable] = {}
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

    def enough(self, just_whole: Collection[int], step: int, least: int) -> bool:
        """Whether sampling may stop.

        Args:
            just_whole: Groups that became whole since it began, by uid.
            step: The next one that takes groups.
            least: Groups that are to become whole before, where there are as many.
        """
        plan = self.schedule
        left = [one for one in self._groups.values() if one.place is None and one.uid not in just_whole]
        if not left:
            return True
        if plan.in_order:
            awaited = list(self._groups)[: plan.batch_size]
            return len(just_whole) >= least and not any(group.uid in awaited for group in left)
        if len(self._groups) - len(left) < plan.batch_size:
            return False
        return not any(self._must_go(group, step) for group in left)

    def age(self, step: int) -> None:
        """Before sampling for `step`: what it could not take any more begins again, or is waited for."""
        plan = self.schedule
        for group in self._groups.values():
            too_old = plan.max_age is not None and group.born is not None and step - 1 - group.born > plan.max_age
            if too_old and not plan.waits and not group.restarted:
                group.begin_again()
                group.restarted = True
                self.tally.restarted += 1
                self.rollouts.pop(group.uid, None)
                self.begun.pop(group.uid, None)
                self._tables.pop(group.uid, None)

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
                group.sampled_by(steps, grid.replica(holder[uid]))
                self._tables[uid] = _of_prompt(teaching, uid)
            else:
                self._forget(uid)
                self._rejected += self.rollouts.pop(uid, [])
                self.tally.dropped += 1
        self.tally.drawn = table if self.tally.drawn is None else SampleTable.join([self.tally.drawn, table])

    def stopped(self, replicas: Mapping[int, int], steps: int) -> None:
        """Sampling has ended with samples of groups that are not whole.

        Args:
            replicas: By uid, which has them.
            steps: In the weights that sampled.
        """
        for uid, replica in replicas.items():
            self._groups[uid].sampled_by(steps, replica)

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
        rollouts, tables = [*self._rejected], []
        for group in taken:
            rollouts += self.rollouts.pop(group.uid, [])
            tables.append(self._tables.pop(group.uid))
            self._forget(group.uid)
        self.tally, self._rejected = Tally(), []
        return Taken(
            rollouts,
            SampleTable.join(tables) if tables else last.scored,
            {group.uid: group.data_source for group in taken} if tables else tally.names,
            tally,
            sum(group.born is not None for group in self._groups.values()),
        )

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
        held = [*self._tables.values(), *([] if self._last is None else [self._last])]
        turns = {key: list(rewards) for table in held for key, rewards in table.turn_rewards.items()}
        return {
            "schedule": asdict(replace(self.schedule, num_steps=None)),
            "groups": [asdict(group) for group in self._groups.values()],
            "num_whole": self._num_whole,
            "steps_of": sorted(self._steps_of.items()),
            "turn_rewards": [[*key, rewards] for key, rewards in turns.items()],
            "tally": tally,
        }

    def tables(self) -> tuple[tuple[str, ...], dict[str, Tensor]]:
        """Columns, and rows of what is whole (`rows`), of the tally (`drawn`) and of what came last (`last`)."""
        if self._last is None:
            return (), {}
        found = {"last": self._last.rows_NC}
        if self._tables:
            found["rows"] = SampleTable.join(list(self._tables.values())).rows_NC
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
        place = self._last.columns.index("rank") if self._last is not None else 0
        for group in self._groups.values():
            if group.replica is not None:
                group.replica %= len(rank_of)
                if group.uid in self._tables:
                    self._tables[group.uid].rows_NC[:, place] = rank_of[group.replica]

    def begin_again(self) -> None:
        """All prompts in flight are sampled from the start: what they had does not fit the run any more."""
        for group in self._groups.values():
            group.begin_again()
        self.rollouts, self.begun, self._tables = {}, {}, {}
        self.tally, self._last = Tally(), None

    def follow(self, state: Mapping[str, Any], columns: Sequence[str], tables: Mapping[str, Tensor]) -> None:
        """Takes over what `state_dict` and `tables` gave, here or on another rank; samples stay as they are."""
        self._groups = {item["uid"]: Group(**item) for item in state["groups"]}
        self._num_whole = int(state["num_whole"])
        self._steps_of = {int(version): int(steps) for version, steps in state["steps_of"]}
        self.tally = Tally(**state["tally"])
        self.tally.whole = [(int(uid), str(source), str(name)) for uid, source, name in self.tally.whole]
        turns = {(int(uid), int(sample)): list(rewards) for uid, sample, rewards in state["turn_rewards"]}
        named = {name: SampleTable(tuple(columns), rows, turns) for name, rows in tables.items()}
        self._last, self.tally.drawn = named.get("last"), named.get("drawn")
        rows = named.get("rows")
        uids = set() if rows is None else set(rows["uid"].long().tolist())
        self._tables = {uid: _of_prompt(rows, uid) for uid in uids if rows is not None}


def _of_prompt(table: SampleTable, uid: int) -> SampleTable:
    """The rows of a prompt."""
    turns = {key: rewards for key, rewards in table.turn_rewards.items() if key[0] == uid}
    return SampleTable(table.columns, table.rows_NC[table["uid"] == uid], turns)
