"""Samples arrive, balanced, at the ranks that train on them: over real ranks."""

import pytest
import torch

from mrl.rollout.dispatch import StageRoutingFormat, dispatch_samples
from mrl.rollout.sample_table import gather_table
from tests.ranks import run_ranks
from tests.rollout.samples import LAYERS, TOP_K, groups_of, prompts, rollouts_of, routed, sampled


def packed(grid_args, count, minibatch_size, routing=None, *, shares=True):
    groups = groups_of(grid_args)
    rollouts = sampled(groups, count)
    table = gather_table(rollouts, groups, ["r"])
    data = dispatch_samples(rollouts, table, groups, minibatch_size, keep_groups=shares, routing=routing)
    if not groups.is_trainer:
        assert (data.minibatches, data.batch.tokens_P.numel(), data.index_B.numel()) == ([], 0, 0)
        return None, []
    if routing is None:
        assert data.batch.routed_experts_P is None
    else:
        own = list(routing.layers[groups.coords.pp])
        record = data.batch.routed_experts_P
        assert record.dtype == routing.dtype
        assert torch.equal(record, routed(data.batch.tokens_P.tolist())[:, own].to(routing.dtype))
    tokens = torch.split(data.batch.tokens_P, data.batch.seq_lens_B.tolist())
    logprobs = torch.split(data.batch.rollout_logprobs_R, data.batch.response_lens_B.tolist())
    masks = torch.split(data.batch.response_mask_R, data.batch.response_lens_B.tolist())
    for uid, ids, mask in zip(data.batch.group_id_B.tolist(), tokens, masks, strict=True):
        assert mask.tolist() == [uid % 2 == 1 or token % 3 != 1 for token in ids[len(ids) - len(mask) :].tolist()]
    rows = [
        (int(table["uid"][i]), int(table["sample_index"][i]), t.tolist(), p.tolist(), float(r))
        for i, t, p, r in zip(data.index_B.tolist(), tokens, logprobs, data.batch.rewards_B, strict=True)
    ]
    return groups.coords, [[rows[i] for i in minibatch] for minibatch in data.minibatches]


def expected_rows(uids):
    rows = []
    for prompt in prompts(max(uids) + 1):
        if prompt.uid in uids:
            for r in rollouts_of(prompt):
                tokens = [*prompt.prompt_ids, *r.response_ids]
                rows.append((prompt.uid, r.sample_index, tokens, r.rollout_logprobs, r.reward))
    return rows


@pytest.mark.parametrize(
    "grid_args",
    [
        *({}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"cp": 2, "pp": 2}),
        {"rollout_tp": 2},
        {"tp": 4, "rollout_tp": 4},
        {"rollout_ranks": 1},
        {"tp": 2, "rollout_ranks": 2},
        {"pp": 2, "rollout_ranks": 2, "rollout_tp": 2},
    ],
)
def test_minibatches_hold_the_same_samples_at_every_layout(grid_args):
    results = run_ranks(4, packed, grid_args, 7, 3)
    for minibatch, uids in enumerate([{0, 1, 2}, {3, 4, 5}, {6}]):
        by_dp = {}
        for coords, minibatches in results:
            if coords is None:  # a rank that only samples
                continue
            by_dp.setdefault(coords.dp, minibatches[minibatch])
            assert by_dp[coords.dp] == minibatches[minibatch], "ranks of one data-parallel index differ"
        assert sorted(row for rows in by_dp.values() for row in rows) == expected_rows(uids)


def test_samples_of_a_prompt_go_to_one_rank_where_it_computes_their_prompt_once():
    for shares in (True, False):
        uids = [{row[0] for row in minibatches[0]} for _, minibatches in run_ranks(4, packed_alike, shares)]
        assert (sum(map(len, uids)) == len(set.union(*uids)) == 8) == shares


def packed_alike(shares):
    return packed({}, 8, 8, shares=shares)


@pytest.mark.parametrize(
    ("grid_args", "layers"),
    [
        ({}, [range(LAYERS)]),
        ({"tp": 2, "rollout_tp": 2}, [range(LAYERS)]),
        ({"tp": 2, "pp": 2}, [[0], [1, 2, 3]]),
        ({"pp": 2, "rollout_ranks": 2}, [[0], [1, 2, 3]]),
        ({"cp": 2, "pp": 2, "vpp": 2}, [[0, 2], [1, 3]]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_of_the_engines_choices_a_stage_gets_those_of_its_layers(grid_args, layers, dtype):
    routing = StageRoutingFormat(LAYERS, TOP_K, dtype, layers)
    assert len(run_ranks(4, packed, grid_args, 7, 3, routing)) == 4
    assert len(run_ranks(4, packed, grid_args, 1, 1, routing)) == 4  # some ranks get nothing


def misses_a_record(routing):
    try:
        packed({}, 3, 3, routing)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_missing_record_makes_every_rank_raise():
    for message in run_ranks(4, misses_a_record, StageRoutingFormat(5, 3, torch.int8, [range(5)])):
        assert "returned a routing record of shape" in message


def test_a_rank_without_samples_gets_empty_minibatches():
    results = run_ranks(4, packed, {}, 1, 1)
    assert sorted(row for _, minibatches in results for row in minibatches[0]) == expected_rows({0})
    assert any(not minibatches[0] for _, minibatches in results)
