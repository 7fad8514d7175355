"""The experts that vLLM tells are those that transformers' routers choose, with any cache and layout."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mrl.distributed.groups import make_rollout_group
from mrl.engines.base import SamplingConfig
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_folder
from mrl.parallel_layout import ParallelLayout
from tests.engines.native.test_experts import chosen_by
from tests.engines.native.tiny import make_prompts, reference, refit
from tests.engines.vllm import tiny
from tests.ranks import run_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_ranks")]

LENGTHS = (40, 3, 64, 20, 40)
SAMPLED = SamplingConfig(n=3, max_tokens=12, temperature=0.9, stop_token_ids=(5, 6, 7, 8), seed=2)
WAYS = {
    "at once": {},
    "in parts, few at a time, from the cache": {
        "max_num_batched_tokens": 17,
        "max_num_seqs": 2,
        "engine_kwargs": {"vllm": {"block_size": 32}},
    },
}


def num_tokens(rollouts):
    return sum(len(rollout.response_ids) for rollout in rollouts)


def told(folder, settings, grid):
    """Samples of an engine that held other weights before, and cached the same prompts under them; then cut ones."""
    group = make_rollout_group(grid, dist.get_rank())
    with tiny.engine(folder, tp_group=group, enable_rollout_routing_replay=True, **settings) as engine:
        refit(engine, folder, arch_from_folder(folder))
        write = engine._storage.write
        engine._storage.write = lambda item: write(replace(item, data=item.data * -1.5))
        refit(engine, folder, arch_from_folder(folder))
        others = engine.generate(make_prompts(LENGTHS), SAMPLED)
        engine._storage.write = write
        refit(engine, folder, arch_from_folder(folder))
        whole = engine.generate(make_prompts(LENGTHS), SAMPLED)
        engine.spec = replace(engine.spec, decode=lambda ids: "".join(f"[{one}]" for one in ids))
        cut = engine.generate(make_prompts(LENGTHS), replace(SAMPLED, stop=("[11]", "[3]")))
    assert any(
        (a.routed_experts != b.routed_experts).any()
        for a, b in zip(others, whole, strict=True)
        if a.routed_experts.shape == b.routed_experts.shape
    )
    assert num_tokens(cut) < num_tokens(whole)
    return [*whole, *cut]


def assert_told(model, rollouts, top_k):
    for rollout in rollouts:
        ids = [*rollout.prompt.prompt_ids, *rollout.response_ids]
        expected, found = chosen_by(model, rollout), rollout.routed_experts
        assert found.shape == (len(ids), *expected.shape[1:]) and found.dtype == torch.int8
        assert expected.size(-1) == top_k and (found[-1] == -1).all()
        assert torch.equal(found[:-1].long().sort().values, expected.sort().values)


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("qwen3_moe", "at once"),
        ("mixtral", "in parts, few at a time, from the cache"),
        ("glm4_moe", "at once"),
        ("deepseek_v2", "at once"),
    ],
)
def test_they_are_those_of_transformers(family, way, folders):
    """Of a replica of two ranks, each of which tells them."""
    folder = folders(family)
    model = reference(folder)
    for rollouts in run_ranks(2, told, folder, WAYS[way], ParallelLayout(2, rollout_tp=2)):
        assert_told(model, rollouts, arch_from_folder(folder).moe.top_k)


def without(folder):
    group = make_rollout_group(ParallelLayout(2, rollout_tp=2), dist.get_rank())
    with tiny.engine(folder, tp_group=group) as engine:
        refit(engine, folder, arch_from_folder(folder))
        bare = engine.generate(make_prompts((3,)), SAMPLED)
        arch = engine.spec.arch
    other = replace(arch, moe=replace(arch.moe, top_k=3))
    try:
        with tiny.engine(folder, tp_group=group, arch=other, enable_rollout_routing_replay=True):
            pass
    except UserError as error:
        return bare, str(error)
    return bare, ""


def test_they_are_told_where_they_are_asked_for_and_of_mrls_model(folders):
    for bare, said in run_ranks(2, without, folders("qwen3_moe")):
        assert all(rollout.routed_experts is None for rollout in bare)
        assert "it records (2, 2) per token, expected (2, 3)" in said
