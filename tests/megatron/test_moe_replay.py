"""The engine's experts, replayed by the actor: its own choice changes nothing, another is the dense reference's."""

import math

import pytest
import torch
import torch.distributed as dist

from mrl.algorithms.base import build
from mrl.checkpoint.formats.hf import load_from_hf
from mrl.config.config import AlgorithmConfig, RolloutConfig
from mrl.data.shared_prefix import shared_prefixes
from mrl.megatron.router import packed_routing
from mrl.models.hf_config import arch_from_folder
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.megatron import stage_layers
from tests.megatron.actors import CONSTANT, EXPERT_LAYOUTS, algorithm, make_batch, make_policy, own_part, scores
from tests.megatron.mixtures import SIZES, by_hand, load_model, make_model
from tests.ranks import run_ranks

PARITY = 1e-4  # the bound on log-probabilities in fp32
SAME = 1e-5  # the same experts in another order: fp32 sums of two terms
DIFFERENT = 0.1  # nats; random experts are not the actor's own
RELATIVE = 1e-4  # fp32 against fp64
FAMILIES = {"qwen3_moe": 8, "qwen2_moe": 4}
"""Family -> experts; the first scales the weights of the chosen ones to a sum of 1, the second does not."""
TOP_K, LAYERS = SIZES["num_experts_per_tok"], SIZES["num_hidden_layers"]
LAYOUTS = {"single": ParallelLayout(1), **EXPERT_LAYOUTS}
CASES = [
    *((family, layout, {}) for family in FAMILIES for layout in ("single", "tp2_ep2")),
    ("qwen3_moe", "ep2_dp2", {}),
    ("qwen3_moe", "cp2_ep2", {}),
    ("qwen3_moe", "tp2_ep2_pp2", {"recompute": "full"}),
    ("qwen2_moe", "ep2_pp2_vpp2", {"max_tokens_per_microbatch": 24}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for index, family in enumerate(FAMILIES):
        folder = tmp_path_factory.mktemp(family)
        make_model(family, seed=20 + index).save_pretrained(folder)
        found[family] = str(folder)
    return found


def random_choice(batch, num_experts):
    """Experts of an engine that chooses at random: the same after the same tokens, none for the last of a response."""
    lens = batch.seq_lens_B.tolist()
    generator = torch.Generator().manual_seed(8)
    scores_DLE = torch.rand(sum(lens), LAYERS, num_experts, generator=generator)
    chosen = scores_DLE.topk(TOP_K, -1).indices[shared_prefixes(batch.tokens_P, lens).distinct_P]
    chosen[batch.seq_lens_B.cumsum(0) - 1] = -1
    return chosen.to(torch.int16)


@pytest.fixture(scope="module")
def references(folders):
    """Family -> (batch with random experts, by_hand of them, by_hand of the model's own)."""
    found = {}
    for family, num_experts in FAMILIES.items():
        batch = make_batch(longest=12)
        chosen = random_choice(batch, num_experts)
        found[family] = (
            chosen,
            by_hand(load_model(folders[family], family), batch, given_PLK=chosen),
            by_hand(load_model(folders[family], family), batch),
        )
    return found


def replay(folder, grid, chosen, actor):
    """Scores, scores as a reference, and the gradient norm, of an actor that replays `chosen`."""
    arch = arch_from_folder(folder)
    policy = make_policy(arch, grid, seed=None, actor={"clip_grad": 0.0, "router_replay": "rollout", **actor})
    load_from_hf(folder, arch, policy.layout(), policy.named_tensors())
    batch = make_batch(longest=12)
    own = stage_layers(arch, grid)[grid.coords(dist.get_rank()).pp]
    batch.routed_experts_P = None if chosen is None else chosen[:, own]
    scored = scores(policy, batch)
    for name, tensor in policy.named_tensors().items():
        policy.reference_tensors()[name].copy_(tensor)
    with policy.using_reference():
        own = scores(policy, batch)
    policy.start_optimizer(CONSTANT)
    sft = build(AlgorithmConfig(name="sft"), RolloutConfig())
    return scored[0], own[0], policy.update(own_part(batch, policy), sft)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout", "actor"), CASES, ids=str)
def test_replayed_experts_are_the_references_and_their_router_learns(family, layout, actor, folders, references):
    """At each pipeline stage with its own layers, with shared prompts; the reference policy replays nothing."""
    chosen, expected, own = references[family]
    assert float((expected.logprobs_R - own.logprobs_R).abs().max()) > DIFFERENT
    grid = LAYOUTS[layout]
    for scored, as_reference, metrics in run_ranks(grid.world_size, replay, folders[family], grid, chosen, actor):
        torch.testing.assert_close(scored, expected.logprobs_R, rtol=0, atol=PARITY)
        torch.testing.assert_close(as_reference, own.logprobs_R, rtol=0, atol=PARITY)
        assert math.isclose(metrics["actor/grad_norm"], expected.grad_norm, rel_tol=RELATIVE)
        assert math.isclose(metrics["actor/nll"], expected.nll, rel_tol=RELATIVE)


def both(folder, chosen):
    """Scores and update with the given experts, and with the actor's own."""
    replayed, own, metrics = replay(folder, ParallelLayout(1), chosen, {})
    _, _, plain = replay(folder, ParallelLayout(1), None, {"router_replay": "none"})
    return replayed, own, metrics, plain


@pytest.mark.parametrize("family", FAMILIES)
def test_the_actors_own_experts_change_nothing(family, folders, references):
    chosen = references[family][2].chosen_PLK
    replayed, own, metrics, plain = run_ranks(1, both, folders[family], chosen)[0]
    torch.testing.assert_close(replayed, own, rtol=0, atol=SAME)
    for key, value in plain.items():
        assert math.isclose(metrics[key], value, rel_tol=RELATIVE, abs_tol=SAME), key


def test_a_shared_token_is_routed_as_the_sequence_that_knows_it():
    """The last token of one sequence is the middle of another."""
    tokens = torch.tensor([5, 6, 5, 6, 7])
    prefixes = shared_prefixes(tokens, [2, 3])
    chosen = torch.tensor([[[0, 1]], [[-1, -1]], [[0, 1]], [[2, 3]], [[-1, -1]]])
    routing = packed_routing(prefixes.distinct_P, 5, chosen, [0], num_experts=4)
    by_token = routing.experts_DLK[prefixes.distinct_P][:, 0].tolist()
    assert by_token == [[0, 1], [2, 3], [0, 1], [2, 3], [-1, -1]]
    assert routing.token_counts_D.tolist() == [2, 2, 1, 0, 0]
    assert routing.experts_DLK[3:].unique().tolist() == [-1]


@pytest.mark.parametrize(
    ("chosen", "said"),
    [([[[0, 4]]], "expected 0 to 3"), ([[[-2, 0]]], "are in"), ([[[1, 1]]], "an expert twice")],
)
def test_choices_that_are_no_experts_are_refused(chosen, said):
    with pytest.raises(RuntimeError, match=said):
        packed_routing(torch.tensor([0]), 1, torch.tensor(chosen), [0], num_experts=4)


def test_choices_of_other_layers_are_refused():
    with pytest.raises(RuntimeError, match="have 2 layers, but this pipeline stage has 1"):
        packed_routing(torch.tensor([0]), 1, torch.tensor([[[0], [1]]]), [3], num_experts=4)


def test_no_sequences_have_a_routing():
    nothing = torch.empty(0, dtype=torch.int64)
    routing = packed_routing(nothing, 2, torch.empty(0, 4, 2), range(4), num_experts=4)
    assert routing.token_counts_D.tolist() == [0, 0]
    assert routing.experts_DLK.shape == (2, 4, 2)


def without_choice(folder):
    """An update of rollouts without experts is refused; supervised steps have none."""
    policy = make_policy(arch_from_folder(folder), ParallelLayout(1), actor={"router_replay": "rollout"})
    policy.start_optimizer(CONSTANT)
    policy.update(make_batch(), build(AlgorithmConfig(name="sft"), RolloutConfig()))
    with pytest.raises(RuntimeError, match="routed_experts_P is not set"):
        policy.update(make_batch(), algorithm())


def test_replay_without_the_engines_experts_is_refused(folders):
    run_ranks(1, without_choice, folders["qwen2_moe"])
