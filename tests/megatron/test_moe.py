"""A mixture of experts on the actor scores as transformers does, at every layout; its parameters are the layout's."""

import pytest
import torch

from mrl.checkpoint.formats.hf import load_from_hf
from mrl.models.hf_config import arch_from_folder
from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import EXPERT_LAYOUTS, MIXTURES, make_batch, make_policy, scores
from tests.megatron.mixtures import MODELS, by_transformers, make_model
from tests.ranks import run_ranks

PARITY = 1e-4  # the bound on log-probabilities in fp32; measured below 2e-5
LAYOUTS = {"single": ParallelLayout(1), **EXPERT_LAYOUTS}
UNEVEN = ParallelLayout(2, pp=2, first_stage_layers=3, last_stage_layers=1)
CASES = [("qwen3_moe", layout) for layout in LAYOUTS] + [
    *(("gpt_oss", layout) for layout in ("single", "ep2", "tp2_ep2", "ep2_pp2", "cp2_ep2")),
    *(
        (family, layout)
        for family in ("qwen2_moe", "mixtral", "qwen3_moe_mixed", "glm4_moe")
        for layout in ("single", "ep2", "tp2_ep2", "tp2_ep2_etp2", "ep2_pp2")
    ),
]
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family -> (folder, batch, log-probabilities and entropy by transformers)."""
    found = {}
    for index, family in enumerate(MODELS):
        model = make_model(family, seed=index)
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        batch = make_batch(6, seed=index, longest=50)
        found[family] = str(folder), batch, by_transformers(model, batch)
    return found


def by_megatron(folder, grid, batch, actor):
    arch = arch_from_folder(folder)
    policy = make_policy(arch, grid, seed=None, actor={"max_tokens_per_microbatch": 110, **actor})
    load_from_hf(folder, arch, policy.layout(), policy.named_tensors())
    return scores(policy, batch)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_log_probabilities_and_entropy_are_those_of_transformers(family, layout, folders):
    folder, batch, expected = folders[family]
    for found in run_ranks(LAYOUTS[layout].world_size, by_megatron, folder, LAYOUTS[layout], batch, {}):
        torch.testing.assert_close(found, expected, rtol=0, atol=PARITY)


@pytest.mark.parametrize(
    ("layout", "actor"),
    [("ep2", ALLGATHER), ("tp2_ep2_etp2", ALLGATHER), ("ep2", {"moe_router_dtype": "fp64"})],
    ids=str,
)
def test_dispatcher_and_dtype_of_the_router_change_nothing(layout, actor, folders):
    folder, batch, expected = folders["qwen2_moe"]
    for found in run_ranks(LAYOUTS[layout].world_size, by_megatron, folder, LAYOUTS[layout], batch, actor):
        torch.testing.assert_close(found, expected, rtol=0, atol=PARITY)


def names_and_shapes(grid):
    """Of each family: whether the model has what the layout says."""
    return [
        {key: tuple(value.shape) for key, value in policy.named_tensors().items()}
        == {key: value.shape for key, value in policy.layout().items()}
        for arch in MIXTURES.values()
        if not (arch.moe.biases and grid.expert_tp > 1)
        for policy in [make_policy(arch, grid, seed=None)]
    ]


@pytest.mark.parametrize(
    "grid",
    [UNEVEN, *(EXPERT_LAYOUTS[name] for name in ("ep2", "tp2_ep2", "tp2_ep2_etp2", "tp2_ep2_pp2", "ep2_pp2_vpp2"))],
    ids=str,
)
def test_parameters_are_those_of_the_layout(grid):
    for found in run_ranks(grid.world_size, names_and_shapes, grid):
        assert found and all(found)
