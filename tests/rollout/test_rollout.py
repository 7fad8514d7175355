"""Spreading, bringing together and balancing of rollouts, over real ranks."""

import pytest
import torch
import torch.distributed as dist

from mrl.distributed.groups import ProcessGroups, make_rollout_group
from mrl.grid import Grid
from mrl.rollout.rollout import LengthHistory, assign, gather_facts, gather_table, pack
from mrl.types import Prompt, Rollout
from tests.ranks import run_ranks

SAMPLES = 3
ROUTING = (2, 3)
"""Layers and experts of a token of the engine's record."""


def prompts(count):
    return [Prompt(uid, tuple(range(uid % 5 + 1)), f"p{uid}", source=f"data:{uid}") for uid in range(count)]


def rollouts_of(prompt):
    """What any replica would sample for the prompt: lengths and values follow from the ids alone."""
    for sample in range(SAMPLES):
        length = (prompt.uid * 7 + sample * 3) % 6 + 1
        ids = [100 * prompt.uid + 10 * sample + i for i in range(length)]
        yield Rollout(
            prompt, sample, ids, [-0.5 * i for i in ids], "length" if length == 6 else "stop", 0,
            reward=float(length), reward_parts={"r": float(length)}, routed_experts=routed([*prompt.prompt_ids, *ids]),
        )  # fmt: skip


def routed(ids):
    """A record in which every entry tells its token, layer and place."""
    tokens = torch.tensor(ids, dtype=torch.int16)[:, None, None] * 10
    return tokens + torch.arange(6, dtype=torch.int16).view(ROUTING)


def packed(grid_args, count, minibatch_size, routing=None):
    rank = dist.get_rank()
    grid = Grid(dist.get_world_size(), **grid_args)
    world = dist.group.WORLD
    groups = ProcessGroups(rank, grid, world, world, world, world, world, make_rollout_group(grid, rank))
    mine = assign(prompts(count), grid.num_replicas, SAMPLES, LengthHistory(4.0))[grid.replica(rank)]
    rollouts = [rollout for prompt in mine for rollout in rollouts_of(prompt)]
    table = gather_table(rollouts, groups, ["r"])
    data = pack(rollouts, table, groups, minibatch_size, routing=routing)
    if routing is None:
        assert data.batch.routed_experts_P is None
    else:
        assert torch.equal(data.batch.routed_experts_P, routed(data.batch.tokens_P.tolist()))
    tokens = torch.split(data.batch.tokens_P, data.batch.seq_lens_B.tolist())
    logprobs = torch.split(data.batch.rollout_logprobs_R, data.batch.response_lens_B.tolist())
    rows = [
        (int(table["uid"][i]), int(table["sample_index"][i]), t.tolist(), p.tolist(), float(r))
        for i, t, p, r in zip(data.index_B.tolist(), tokens, logprobs, data.batch.rewards_B, strict=True)
    ]
    return grid.coords(rank), [[rows[i] for i in minibatch] for minibatch in data.minibatches]


def expected_rows(uids):
    rows = []
    for prompt in prompts(max(uids) + 1):
        if prompt.uid in uids:
            for r in rollouts_of(prompt):
                tokens = [*prompt.prompt_ids, *r.response_ids]
                rows.append((prompt.uid, r.sample_index, tokens, r.rollout_logprobs, r.reward))
    return rows


@pytest.mark.parametrize(
    "grid_args", [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"rollout_tp": 2}, {"tp": 4, "rollout_tp": 4}]
)
def test_minibatches_hold_the_same_samples_at_every_layout(grid_args):
    results = run_ranks(4, packed, grid_args, 7, 3)
    for minibatch, uids in enumerate([{0, 1, 2}, {3, 4, 5}, {6}]):
        by_dp = {}
        for coords, minibatches in results:
            by_dp.setdefault(coords.dp, minibatches[minibatch])
            assert by_dp[coords.dp] == minibatches[minibatch], "ranks of one data-parallel index differ"
        assert sorted(row for rows in by_dp.values() for row in rows) == expected_rows(uids)


@pytest.mark.parametrize("grid_args", [{}, {"tp": 2, "rollout_tp": 2}])
def test_the_engines_choices_travel_with_their_tokens(grid_args):
    assert len(run_ranks(4, packed, grid_args, 7, 3, ROUTING)) == 4
    assert len(run_ranks(4, packed, grid_args, 1, 1, ROUTING)) == 4  # some ranks get nothing


def misses_a_record(routing):
    try:
        packed({}, 3, 3, routing)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_missing_record_makes_every_rank_raise():
    for message in run_ranks(4, misses_a_record, (5, 3)):
        assert "the engine did not keep them" in message


def test_a_rank_without_samples_gets_empty_minibatches():
    results = run_ranks(4, packed, {}, 1, 1)
    assert sorted(row for _, minibatches in results for row in minibatches[0]) == expected_rows({0})
    assert any(not minibatches[0] for _, minibatches in results)


def test_long_answers_start_first_and_spread_over_replicas():
    history = LengthHistory(1.0)
    history.load_state_dict({"default": 1.0, "lengths": {"data:5": 100.0, "data:2": 90.0}})
    first, second = assign(prompts(8), 2, SAMPLES, history)
    assert {first[0].uid, second[0].uid} == {5, 2}


def _history_after_table():
    rank = dist.get_rank()
    grid = Grid(dist.get_world_size())
    world = dist.group.WORLD
    groups = ProcessGroups(rank, grid, world, world, world, world, world, world)
    asked = prompts(4)
    rollouts = [r for prompt in asked[rank::4] for r in rollouts_of(prompt)]
    history = LengthHistory(9.0)
    history.update(asked, gather_table(rollouts, groups, []))
    return history.state_dict()


def test_every_rank_learns_the_same_lengths():
    states = run_ranks(4, _history_after_table)
    means = {f"data:{p.uid}": sum(len(r.response_ids) for r in rollouts_of(p)) / SAMPLES for p in prompts(4)}
    assert all(state == states[0] for state in states)
    assert states[0]["lengths"] == means


def facts_of_every_sample(grid_args, silent):
    """Whether every rank learns what was said of each sample; the replicas in `silent` say nothing."""
    rank = dist.get_rank()
    grid = Grid(dist.get_world_size(), **grid_args)
    world = dist.group.WORLD
    groups = ProcessGroups(rank, grid, world, world, world, world, world, make_rollout_group(grid, rank))
    mine = assign(prompts(5), grid.num_replicas, SAMPLES, LengthHistory(4.0))[grid.replica(rank)]
    rollouts = [rollout for prompt in mine for rollout in rollouts_of(prompt)]
    for rollout in rollouts:
        if grid.replica(rank) not in silent:
            rollout.reward_facts = {"pred": f"{rollout.prompt.uid}\nß", "acc": rollout.sample_index / 3}
    return gather_facts(rollouts, groups), [r.prompt.uid for r in rollouts if r.reward_facts]


@pytest.mark.parametrize("silent", [(), (0,), (0, 1)])
def test_every_rank_learns_what_reward_functions_say(silent):
    found = run_ranks(4, facts_of_every_sample, {"rollout_tp": 2}, silent)
    said = {uid for _, uids in found for uid in uids}
    expected = {(uid, i): {"pred": f"{uid}\nß", "acc": i / 3} for uid in said for i in range(SAMPLES)}
    assert [facts for facts, _ in found] == [expected] * 4
    assert len(said) == {0: 5, 2: 0}.get(len(silent), len(said))
