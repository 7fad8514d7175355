"""The actor's own experts, kept when it scores at the rollout weights and replayed by its updates at others."""

import math
import types

import pytest
import torch
import torch.distributed as dist

from mrl.algorithms.base import build
from mrl.checkpoint.formats.hf import load_from_hf
from mrl.config.config import AlgorithmConfig, RolloutConfig, RolloutCorrectionConfig
from mrl.megatron.router import Router
from mrl.models.hf_config import arch_from_folder
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.megatron import stage_layers
from tests.megatron.actors import CONSTANT, EXPERT_LAYOUTS, full_gradients, make_batch, make_policy, own_part
from tests.megatron.mixtures import by_hand, load_model, make_model
from tests.ranks import run_ranks

PARITY = 1e-4  # log-probabilities in fp32 against fp64
RELATIVE = 1e-4  # fp32 against fp64
DIFFERENT = 0.1  # nats, and of the experts; what a replay that does nothing would change
FAMILY, NUM_EXPERTS = "qwen3_moe", 8
REPLAY = {"router_replay": "recompute", "clip_grad": 0.0}
ALL_IN_ONE, SMALLER = 1000, 24
"""Tokens of a microbatch: one holds the batch; in the other the updates cut it as the scoring pass did not."""
CASES = {
    "single": (ParallelLayout(1), {}),
    "ep2_dp2": (EXPERT_LAYOUTS["ep2_dp2"], {"moe_token_dispatcher_type": "allgather"}),
    "cp2_ep2": (EXPERT_LAYOUTS["cp2_ep2"], {}),
    "tp2_ep2_pp2": (EXPERT_LAYOUTS["tp2_ep2_pp2"], {"recompute": "full"}),
    "ep2_pp2_vpp2": (EXPERT_LAYOUTS["ep2_pp2_vpp2"], {"recompute": "full"}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The weights that sampled, and those of a later update, with other routers too."""
    found = []
    for name, moved in (("sampled", 0.0), ("later", 0.3)):
        model, other = make_model(FAMILY, seed=20), make_model(FAMILY, seed=21)
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                mine.lerp_(theirs, moved)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        found.append(str(folder))
    return found


@pytest.fixture(scope="module")
def expected(folders):
    """By the dense layer: the experts at the rollout weights, and an update at the later ones with and without them."""
    sampled, later = folders
    batch = make_batch(longest=12)
    first = by_hand(load_model(sampled, FAMILY), batch)
    replayed = by_hand(load_model(later, FAMILY), batch, given_PLK=first.chosen_PLK)
    return first, replayed, by_hand(load_model(later, FAMILY), batch)


def load(policy, folder):
    load_from_hf(folder, arch_from_folder(folder), policy.layout(), policy.named_tensors())
    policy.weights_changed()


def supervised():
    return build(AlgorithmConfig(name="sft"), RolloutConfig())


def score_and_update(folders, grid, chosen, actor):
    """Scores at the first weights, and an update at the second, whose microbatches are others."""
    arch = arch_from_folder(folders[0])
    policy = make_policy(arch, grid, seed=None, actor={**REPLAY, **actor})
    load(policy, folders[0])
    whole = make_batch(longest=12)
    whole.routed_experts_P = chosen[:, stage_layers(arch, grid)[grid.coords(dist.get_rank()).pp]]
    batch = own_part(whole, policy)
    wanted, batch.routed_experts_P = batch.routed_experts_P, None
    scored, _ = policy.score_proximal(batch)
    assert torch.equal(batch.routed_experts_P.long(), wanted)
    policy.start_optimizer(CONSTANT)
    load(policy, folders[1])
    policy._forward_backward._max_tokens = SMALLER
    return scored, policy.update(batch, supervised())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_updates_replay_what_the_dense_layer_chose_at_the_rollout_weights(case, folders, expected):
    """At each stage, for each sample, however microbatches are cut; recomputed activations too."""
    first, replayed, own = expected
    grid, actor = CASES[case]
    assert float((replayed.logprobs_R - own.logprobs_R).abs().max()) > DIFFERENT
    assert replayed.changed_frac > DIFFERENT
    for scored, metrics in run_ranks(grid.world_size, score_and_update, folders, grid, first.chosen_PLK, actor):
        if grid.dp == 1:
            torch.testing.assert_close(scored, first.logprobs_R, rtol=0, atol=PARITY)
        assert math.isclose(metrics["actor/nll"], replayed.nll, rel_tol=RELATIVE)
        assert math.isclose(metrics["actor/grad_norm"], replayed.grad_norm, rel_tol=RELATIVE)
        assert math.isclose(metrics["actor/moe_replay_changed_frac"], replayed.changed_frac, rel_tol=RELATIVE)


def watched(policy):
    """Experts of each router of the last forward, as it hands them to the dispatcher, [n, E] by layer."""
    seen = {}
    for chunk in policy.chunks:
        for module in chunk.modules():
            if isinstance(module, Router):
                module.register_forward_hook(
                    lambda router, _, output: seen.update({router.layer_number - 1: output[1].clone()})
                )
    return seen


def ratios_and_routes(folder, replay):
    """Two updates of a policy gradient on one batch: ratios, and where the tokens went, in the pass before them too."""
    policy = make_policy(
        arch_from_folder(folder),
        ParallelLayout(1),
        seed=None,
        actor={**REPLAY, "router_replay": replay, "max_tokens_per_microbatch": ALL_IN_ONE},
    )
    load(policy, folder)
    batch = make_batch(longest=12)
    grpo = build(
        AlgorithmConfig(name="grpo", rollout_correction=RolloutCorrectionConfig(bypass_mode=False)), RolloutConfig(n=2)
    )
    seen = watched(policy)
    batch.proximal_logprobs_R, _ = policy.score_proximal(batch)
    routes = [dict(seen)]
    policy.start_optimizer(CONSTANT)
    ratios = []
    for _ in range(2):
        metrics = policy.update(batch, grpo)
        ratios.append((metrics["actor/ratio_min"], metrics["actor/ratio_max"]))
        routes.append(dict(seen))
        for name, tensor in policy.named_tensors().items():
            if "router" in name:
                tensor.add_(torch.linspace(-0.5, 0.5, tensor.numel()).view_as(tensor))
    return ratios, [[torch.equal(routes[0][layer], later[layer]) for layer in routes[0]] for later in routes[1:]]


def test_the_router_hands_on_the_kept_experts_after_its_weights_moved(folders):
    ratios, same = run_ranks(1, ratios_and_routes, folders[0], "recompute")[0]
    assert ratios[0] == (1.0, 1.0)
    assert ratios[1] != (1.0, 1.0)
    assert same == [[True] * 4, [True] * 4]


def test_without_replay_the_same_step_sends_tokens_elsewhere(folders):
    ratios, same = run_ranks(1, ratios_and_routes, folders[0], "none")[0]
    assert ratios[0] == (1.0, 1.0)
    assert same[0] == [True] * 4
    assert not any(same[1])


def gradients(folders, replay):
    """Of one microbatch at the later weights, with the experts of the first, and those by layer.

    replay: "recompute", or "megatron": plain routers with Megatron's own `RouterReplay`, driven as verl does it.
    """
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    actor = {**REPLAY, "use_distributed_optimizer": False, "max_tokens_per_microbatch": ALL_IN_ONE}
    theirs = replay == "megatron"
    policy = make_policy(
        arch_from_folder(folders[0]),
        ParallelLayout(1),
        seed=None,
        actor={**actor, "router_replay": "none" if theirs else replay},
    )
    RouterReplay.clear_global_router_replay_instances()
    routers = [module for chunk in policy.chunks for module in chunk.modules() if isinstance(module, Router)]
    for router in routers if theirs else ():
        router.router_replay = RouterReplay()
        router.routing = types.MethodType(TopKRouter.routing, router)
    load(policy, folders[0])
    batch = make_batch(longest=12)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    policy.score_proximal(batch)
    if theirs:
        chosen = RouterReplay.get_recorded_data()
        RouterReplay.set_replay_data(chosen)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    else:
        (micro,) = policy._forward_backward.microbatches(batch, policy._sampling_distribution)
        chosen = list(micro.packed.routing.experts_DLK.long().unbind(1))
    policy.start_optimizer(CONSTANT)
    load(policy, folders[1])
    batch.routed_experts_P = None if theirs else batch.routed_experts_P
    policy.update(batch, supervised())
    RouterReplay.clear_global_router_replay_instances()
    return chosen, full_gradients(policy)


def both(folders):
    return gradients(folders, "recompute"), gradients(folders, "megatron")


def test_gradients_are_those_of_megatrons_own_replay(folders):
    """Bit for bit, the router's among them."""
    (chosen, ours), (recorded, theirs) = run_ranks(1, both, folders)[0]
    for mine, their in zip(chosen, recorded, strict=True):
        known = mine[:, 0] >= 0  # filling is replayed by none
        assert torch.equal(mine[known], their[known])
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert sum(float(ours[name].abs().max()) > 0 for name in ours if name.endswith("mlp.gate.weight")) == 4


def of_a_rank_without_sequences(folder):
    policy = make_policy(arch_from_folder(folder), EXPERT_LAYOUTS["ep2"], seed=None, actor=REPLAY)
    load(policy, folder)
    batch = make_batch(longest=12)
    batch = batch if dist.get_rank() == 0 else batch.select([])
    logprobs, _ = policy.score_proximal(batch)
    policy.start_optimizer(CONSTANT)
    policy.update(batch, supervised())
    return logprobs.shape, batch.routed_experts_P.shape


def test_a_rank_without_sequences_keeps_nothing_and_takes_part(folders):
    (_, some), (scored, none) = run_ranks(2, of_a_rank_without_sequences, folders[0])
    assert some[0] == make_batch(longest=12).tokens_P.numel()
    assert scored == (0,) and none == (0, 4, 2)
