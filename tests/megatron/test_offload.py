"""The actor comes back from host memory bit by bit, in every layout, and nothing of it stays on the device."""

import pytest
import torch

from mrl.megatron import checkpoint
from mrl.megatron.offload import PARTS, pinned
from tests.megatron.actors import (
    ARCHS,
    EXPERT_LAYOUTS,
    LAYOUTS,
    MIXTURES,
    full_weights,
    make_batch,
    make_policy,
    own_part,
    train,
)  # fmt: skip
from tests.ranks import run_ranks

AWAY = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
STEPS = 2


def held(policy, part):
    return [tensor.untyped_storage().nbytes() for tensor in policy._tensors_of(part)]


def trained(name, grid, options, leaves):
    """Metrics and weights of updates, between which the actor leaves the device, or not."""
    policy = make_policy({**ARCHS, **MIXTURES}[name], grid, **options)
    metrics = []
    for step in range(STEPS):
        metrics += train(policy, 1, first=step)
        if leaves:
            policy.offload()
            for part in PARTS:
                assert not any(held(policy, part)), part
            policy.score(own_part(make_batch(), policy))
            assert all(held(policy, "weights")) and not any(held(policy, "gradients"))
            policy.offload(keep=["weights"])
            assert all(held(policy, "weights"))
            policy.offload()
    return metrics, full_weights(policy)


CASES = [
    ("qwen2", LAYOUTS["single"], {}),
    ("qwen3", LAYOUTS["tp2_pp2"], {"dtype": "bfloat16"}),
    ("qwen2", LAYOUTS["dp2"], {"actor": {"use_distributed_optimizer": False}, "dtype": "bfloat16"}),
    ("qwen2_moe", EXPERT_LAYOUTS["ep2"], {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "grid", "options"), CASES, ids=["single", "tp2_pp2_bf16", "dp2_bf16", "ep2"])
def test_training_goes_on_as_if_nothing_had_left(name, grid, options):
    away = {**options, "actor": {**options.get("actor", {}), **AWAY}}
    stayed = run_ranks(grid.world_size, trained, name, grid, options, False)
    left = run_ranks(grid.world_size, trained, name, grid, away, True)
    for (metrics, weights), (expected, full) in zip(left, stayed, strict=True):
        assert metrics == expected
        assert weights.keys() == full.keys() and all(torch.equal(weights[key], full[key]) for key in full)


def saved_while_away(folder):
    policy = make_policy(ARCHS["qwen2"], LAYOUTS["single"], actor=AWAY)
    train(policy, 1)
    before = full_weights(policy)
    policy.offload()
    checkpoint.save(folder, policy)
    train(policy, 1)
    policy.offload()
    checkpoint.load(folder, policy)
    policy.offload()
    return before, full_weights(policy)


def test_a_checkpoint_is_saved_and_loaded_while_the_actor_is_away(tmp_path):
    ((before, after),) = run_ranks(1, saved_while_away, tmp_path / "actor")
    assert all(torch.equal(before[key], after[key]) for key in before)


def copied_bytes(actor):
    policy = make_policy(ARCHS["qwen2"], LAYOUTS["single"], actor=actor, dtype="bfloat16")
    train(policy, 1)
    own = {part: sum(tensor.nbytes for tensor in policy._tensors_of(part)) for part in PARTS}
    sizes = []
    for _ in range(2):
        policy.offload()
        sizes.append(sum(host.numel() for hosts in policy._offload._hosts.values() for host in hosts.values()))
        policy.onload(*PARTS)
    return own, sizes


def test_host_buffers_hold_weights_and_optimizer_once_and_are_kept():
    ((own, sizes),) = run_ranks(1, copied_bytes, AWAY)
    assert sizes[0] == sizes[1]
    assert own["weights"] + own["optimizer"] <= sizes[0] <= 1.02 * (own["weights"] + own["optimizer"])
    ((_, sizes),) = run_ranks(1, copied_bytes, {})
    assert sizes == [0, 0]


@pytest.mark.gpu
def test_a_pinned_buffer_takes_what_it_holds():
    host = pinned(2**20 + 1)
    assert host.numel() == 2**20 + 1 and host.is_pinned()
    host.copy_(torch.arange(host.numel(), device="cuda") % 251, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host, (torch.arange(host.numel()) % 251).to(torch.uint8))
