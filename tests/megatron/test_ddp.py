"""Weights that are gathered while the next forward runs: what anybody else reads between updates is whole."""

import pytest
import torch

from mrl.distributed import shared_memory
from mrl.megatron import checkpoint, ddp
from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import ARCHS, CONSTANT, MIXTURES, algorithm, full_weights, make_batch, make_policy, own_part
from tests.megatron.trainings import assert_same, run
from tests.ranks import run_ranks

UNTIED = ARCHS["qwen2_untied"]
OVERLAPPED = {"overlap_grad_reduce": True}
GATHERED = {"ddp": {"overlap_param_gather": True, "bucket_size": 5000}}
"""Buckets of about a layer's size; the output layer has one alone."""
ALIGNED = {"ddp": {**GATHERED["ddp"], "align_param_gather": True}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "grid", "megatron"),
    [
        (UNTIED, ParallelLayout(2), GATHERED),
        (ARCHS["qwen3"], ParallelLayout(4, pp=2), GATHERED),
        (UNTIED, ParallelLayout(4, pp=2, vpp=2), ALIGNED),
        (MIXTURES["qwen3_moe"], ParallelLayout(4, ep=2), GATHERED),
    ],
    ids=["dp2 untied", "dp2_pp2 tied", "dp2_pp2_vpp2 aligned", "ep2_dp2"],
)
def test_gathering_weights_behind_the_forward_changes_no_number(arch, grid, megatron):
    plain = run(arch, grid, actor=OVERLAPPED)
    assert_same(run(arch, grid, actor=OVERLAPPED, megatron=megatron), plain)


def _two_updates(grid, asks):
    """Weights after them; `asks`: by Megatron's collectives, also over one rank."""
    with pytest.MonkeyPatch.context() as patch:
        if asks:
            patch.setattr(ddp, "_is_single_rank", lambda settings: False)
        policy = make_policy(UNTIED, grid)
        policy.start_optimizer(CONSTANT)
        metrics = [policy.update(own_part(make_batch(seed=seed), policy), algorithm()) for seed in (1, 2)]
        return metrics, {name: tensor.clone() for name, tensor in policy.named_tensors().items()}


@pytest.mark.parametrize("grid", [ParallelLayout(1), ParallelLayout(2, tp=2)], ids=["alone", "tp2"])
def test_a_rank_that_shares_its_weights_with_no_other_needs_no_collectives(grid):
    found, right = (run_ranks(grid.world_size, _two_updates, grid, asks) for asks in (False, True))
    for (metrics, weights), (expected, others) in zip(found, right, strict=True):
        assert metrics == expected
        assert metrics[0]["actor/grad_norm"] > 0
        assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


def _between_updates(megatron, folder):
    """What scoring, offloading, a reference and a checkpoint see, each right behind an update."""
    actor = {**OVERLAPPED, "param_offload": True}
    policy = make_policy(UNTIED, ParallelLayout(2), actor=actor, megatron=megatron)
    policy.start_optimizer(CONSTANT)
    batch, seen = make_batch(seed=9), []

    def update(seed):
        policy.update(own_part(make_batch(seed=seed), policy), algorithm())

    update(1)
    seen.append(torch.stack(policy.score(batch)))
    for name, tensor in policy.reference_tensors().items():
        tensor.copy_(policy.named_tensors()[name])
    update(2)
    with policy.using_reference():
        seen.append(torch.stack(policy.score(batch)))
    seen.append(torch.stack(policy.score(batch)))
    update(3)
    policy.offload()
    seen.append(torch.stack(policy.score(batch)))
    update(4)
    checkpoint.save(folder, policy)
    update(5)
    checkpoint.load(folder, policy)
    seen.append(torch.stack(policy.score(batch)))
    update(6)
    return seen, full_weights(policy)


@pytest.mark.slow
def test_whoever_reads_weights_between_updates_has_them_whole(tmp_path):
    plain = run_ranks(2, _between_updates, {"ddp": {"bucket_size": 5000}}, tmp_path / "plain")
    gathered = run_ranks(2, _between_updates, GATHERED, tmp_path / "gathered")
    for (expected, weights), (found, other) in zip(plain, gathered, strict=True):
        for one, two in zip(expected, found, strict=True):
            torch.testing.assert_close(two, one, rtol=0, atol=0)
        for name, weight in weights.items():
            torch.testing.assert_close(other[name], weight, rtol=0, atol=0, msg=name)


def _seen_from_outside(actor):
    """After an update: whether another process would find the weights, and see what the model computes with."""
    policy = make_policy(UNTIED, ParallelLayout(2), actor=actor)
    policy.start_optimizer(CONSTANT)
    policy.update(own_part(make_batch(seed=1), policy), algorithm())
    places = {name: shared_memory.shared_location(tensor) for name, tensor in policy.named_tensors().items()}
    if None in places.values():
        return set(places.values())
    seen = {offer: shared_memory.attach(offer) for offer, _ in places.values()}
    for name, tensor in policy.named_tensors().items():
        offer, first = places[name]
        values = seen[offer][first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        assert torch.equal(values, tensor), name
    return len(seen)


@pytest.mark.parametrize(
    ("actor", "buffers"),
    [({}, 1), ({"use_distributed_optimizer": False}, 1), ({"param_offload": True}, {None})],
    ids=["in Megatron's buffers", "by themselves", "offloaded"],
)
def test_other_ranks_of_the_host_can_see_the_weights_unless_they_are_offloaded(actor, buffers):
    assert run_ranks(2, _seen_from_outside, actor) == [buffers, buffers]
