"""A refit into vLLM's own parameters: byte for byte what its loader makes of the same folder, whole or not at all."""

import functools

import pytest
import torch
import torch.distributed as dist

from mrl.config import CheckpointEngineConfig
from mrl.distributed.collectives import from_rank
from mrl.distributed.groups import make_rollout_group
from mrl.formats.hf import load_from_hf
from mrl.grid import Grid
from mrl.models.hf_config import arch_from_folder
from mrl.refit.refit import Refit
from mrl.weights.megatron import megatron_layout
from mrl.weights.tensors import allocate
from tests.engines.native.tiny import make_prompts, reference
from tests.ranks import close_pools, run_ranks
from tests.vllm import tiny
from tests.vllm.test_engine import SETTINGS, assert_scored

pytestmark = pytest.mark.vllm

FAMILIES = ("qwen2", "qwen3_moe", "qwen2_moe")


@pytest.fixture(scope="module", autouse=True)
def own_ranks():
    """What vLLM does to a process ends with the process."""
    yield
    close_pools()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return functools.cache(lambda family: str(tiny.save(tmp_path_factory.mktemp(family), family)))


def loaded_by_vllm(folder, tp_group):
    """Its parameters when its own loader has read the folder, and packed what it packs."""
    from mrl.engines.vllm import host

    original = host.arguments
    host.arguments = lambda *args: {**original(*args), "load_format": "auto"}
    try:
        with tiny.engine(folder, tp_group=tp_group) as engine:
            return {name: value.data.clone() for name, value in engine._host.model().named_parameters()}
    finally:
        host.arguments = original


class Side:
    """One rank: the folder's weights in an actor's shards, and vLLM."""

    def __init__(self, folder, grid, engine):
        self.arch = arch_from_folder(folder)
        layout = megatron_layout(self.arch, grid, dist.get_rank(), dtype="float32", te=False)
        self.sources = allocate(layout)
        load_from_hf(folder, self.arch, layout, self.sources)
        self.engine = engine
        self.refit = Refit(layout, self.sources, engine, CheckpointEngineConfig(update_weights_bucket_megabytes=1))


def refits(folder, grid):
    group = make_rollout_group(grid, dist.get_rank())
    expected = loaded_by_vllm(folder, group)
    with tiny.engine(folder, tp_group=group) as engine:
        side = Side(folder, grid, engine)
        model = engine._host.model()
        addresses = {name: value.data_ptr() for name, value in model.named_parameters()}
        for version in range(2):
            cost = side.refit(version)
        for name, value in model.named_parameters():
            assert torch.equal(value, expected[name]), name
            assert value.data_ptr() == addresses[name], name
        assert engine.policy_version == 1
        prompts = make_prompts((3, 9, 130, 20))[:2] + make_prompts((40,))
        return cost, engine.generate(prompts, SETTINGS["plain"])


@pytest.mark.parametrize(
    ("family", "grid"),
    [
        ("qwen2", Grid(1)),
        ("qwen3_moe", Grid(1)),
        ("qwen2_moe", Grid(4, tp=2, rollout_tp=2)),
        ("qwen2", Grid(4, tp=2, pp=2, rollout_tp=2)),
        ("qwen3_moe", Grid(4, ep=2, pp=2, rollout_tp=2)),
    ],
    ids=str,
)
def test_its_storage_is_what_its_own_loader_makes(family, grid, folders):
    folder = folders(family)
    model = reference(folder)
    for cost, rollouts in run_ranks(grid.world_size, refits, folder, grid):
        assert cost["refit/bytes_moved"] == cost["refit/bytes_lower_bound"]
        assert_scored(model, rollouts, SETTINGS["plain"])


class LostError(Exception):
    pass


def fails_at(folder, grid):
    """A write that fails at each bucket, an engine that stays shut, and one whole refit that opens it."""
    group = make_rollout_group(grid, dist.get_rank())
    with tiny.engine(folder, tp_group=group) as engine:
        side = Side(folder, grid, engine)
        side.refit(0)
        prompts = make_prompts((3, 9))
        before = engine.generate(prompts, SETTINGS["plain"])
        write, said = engine.update_weights, []
        calls = []
        engine.update_weights = lambda bucket: calls.append(0) or write(bucket)
        side.refit(0)
        for place in range(int(from_rank(grid.world_size - 1, len(calls)))):
            left = iter(range(1000))

            def failing(bucket, left=left, place=place):
                if next(left) == place and dist.get_rank() == grid.world_size - 1:
                    raise LostError(f"call {place} is lost")
                write(bucket)

            engine.update_weights = failing
            for call in (lambda: side.refit(1), lambda: engine.generate(prompts, SETTINGS["plain"])):
                try:
                    call()
                except RuntimeError as error:
                    said.append(str(error))
            engine.update_weights = write
        lose = engine._storage.write
        engine._storage.write = lambda item: None if item.name.endswith("0.mlp.down_proj.weight") else lose(item)
        try:
            side.sources.update({name: tensor.add_(1) for name, tensor in side.sources.items()})
            side.refit(1)
        except RuntimeError as error:
            said.append(str(error))
        engine._storage.write = lose
        for tensor in side.sources.values():
            tensor.sub_(1)
        side.refit(2)
        after = engine.generate(prompts, SETTINGS["plain"])
        same = [r.response_ids for r in before] == [r.response_ids for r in after]
        return said, same


def test_a_failure_anywhere_leaves_it_shut_until_a_whole_refit(folders):
    grid = Grid(4, tp=2, pp=2, rollout_tp=2)
    for said, same in run_ranks(4, fails_at, folders("qwen2"), grid):
        *failures, last = said
        assert len(failures) >= 4
        assert all("is lost" in text for text in failures[::2])
        assert all("weights are not whole" in text for text in failures[1::2])
        assert "a write was lost" in last
        assert same
