"""A refit into vLLM's own parameters: byte for byte what its loader makes of the same folder, whole or not at all."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist

from mrl.checkpoint.formats.hf import load_from_hf
from mrl.config.config import CheckpointEngineConfig
from mrl.distributed.collectives import broadcast_object
from mrl.distributed.groups import make_rollout_group
from mrl.models.hf_config import arch_from_folder
from mrl.parallel_layout import ParallelLayout
from mrl.resharding import weight_sync as of_refit
from mrl.resharding.dtypes import allocate
from mrl.resharding.megatron import megatron_layout
from mrl.resharding.weight_sync import WeightSync
from tests.engines.native.tiny import make_prompts, reference
from tests.engines.vllm import tiny
from tests.engines.vllm.test_engine import SETTINGS, assert_scored
from tests.ranks import run_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_ranks")]

BUCKET_BYTES = 1 << 18
"""Of these small models several to each rank; the least that a config can say is 1 MiB."""


def loaded_by_vllm(folder, tp_group):
    """Its parameters when its own loader has read the folder, and packed what it packs."""
    from mrl.engines.vllm import llm_runtime

    original = llm_runtime.arguments
    llm_runtime.arguments = lambda *args: {**original(*args), "load_format": "auto"}
    try:
        with tiny.engine(folder, tp_group=tp_group) as engine:
            return {name: value.data.clone() for name, value in engine._runtime.model().named_parameters()}
    finally:
        llm_runtime.arguments = original


class Side:
    """One rank: the folder's weights in an actor's shards, and vLLM."""

    def __init__(self, folder, grid, engine):
        self.arch = arch_from_folder(folder)
        layout = megatron_layout(self.arch, grid, dist.get_rank(), dtype="float32", te=False)
        self.sources = allocate(layout)
        load_from_hf(folder, self.arch, layout, self.sources)
        self.engine = engine
        mib, of_refit.MIB = of_refit.MIB, BUCKET_BYTES
        self.refit = WeightSync(layout, self.sources, engine, CheckpointEngineConfig(update_weights_bucket_megabytes=1))
        of_refit.MIB = mib

    def assert_holds(self, expected, addresses):
        for name, value in self.engine._runtime.model().named_parameters():
            assert torch.equal(value, expected[name]), name
            assert value.data_ptr() == addresses[name], name


def said_by(call):
    """What a call that must fail raises."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it did not fail")


class LostError(Exception):
    pass


def failures(side, prompts):
    """What is said when each rank in turn loses each of its buckets, or its end, and what the engine then says."""
    engine, said = side.engine, []
    for rank in range(dist.get_world_size()):
        here = dist.get_rank() == rank
        for name in ("update_weights", "finish_update"):
            whole, calls = getattr(engine, name), []
            setattr(engine, name, lambda given, whole=whole, calls=calls: calls.append(0) or whole(given))
            side.refit(1)
            count = int(broadcast_object(rank, len(calls)))
            for place in range(count):
                left = itertools.count()

                def failing(given, whole=whole, left=left, place=place, here=here):
                    if next(left) == place and here:
                        raise LostError(f"call {place} is lost")
                    whole(given)

                setattr(engine, name, failing)
                said.append((f"call {place}", said_by(partial(side.refit, 1)), said_by(partial(ask, engine, prompts))))
            setattr(engine, name, whole)
    write = engine._storage.write
    engine._storage.write = lambda item: None if "0." in item.name and "attn.o_proj" in item.name else write(item)
    for tensor in side.sources.values():
        tensor.add_(1)
    said.append(
        ("checksum mismatch after weight sync", said_by(partial(side.refit, 1)), said_by(partial(ask, engine, prompts)))
    )
    engine._storage.write = write
    for tensor in side.sources.values():
        tensor.sub_(1)
    return said


def ask(engine, prompts):
    return engine.generate(prompts, SETTINGS["plain"])


def refits(folder, grid):
    """Two refits, failures everywhere and a third one; what was said and sampled in this rank's replica."""
    group, before = make_rollout_group(grid, dist.get_rank()), dist.group.WORLD
    expected = loaded_by_vllm(folder, group)
    replica = dist.get_rank() // grid.rollout_tp
    with tiny.engine(folder, tp_group=group) as engine:
        side = Side(folder, grid, engine)
        addresses = {name: value.data_ptr() for name, value in engine._runtime.model().named_parameters()}
        for version in range(2):
            cost = side.refit(version)
        side.assert_holds(expected, addresses)
        assert engine.policy_version == 1
        prompts = make_prompts((3, 9, 40, 20)[replica:], seed=replica)
        found = {name: engine.generate(prompts, SETTINGS[name]) for name in ("plain", "cut")}
        kept = {name: tensor.clone() for name, tensor in side.sources.items()}
        said = failures(side, prompts)
        side.sources.update({name: tensor.copy_(kept[name]) for name, tensor in side.sources.items()})
        side.refit(2)
        side.assert_holds(expected, addresses)
        assert [r.response_ids for r in ask(engine, prompts)] == [r.response_ids for r in found["plain"]]
    total = torch.ones(1)
    dist.all_reduce(total)
    assert dist.group.WORLD is before and total.item() == grid.world_size
    return cost, found, said


@pytest.mark.parametrize(
    ("family", "grid"),
    [
        ("qwen2", ParallelLayout(1)),
        ("qwen3_moe", ParallelLayout(1)),
        ("qwen2_moe", ParallelLayout(4, tp=2, rollout_tp=2)),
        ("gpt_oss", ParallelLayout(2, ep=2, rollout_tp=2)),
        ("deepseek_v3", ParallelLayout(2, tp=2, rollout_tp=2)),
        ("qwen2", ParallelLayout(4, tp=2, pp=2, rollout_tp=2)),
        ("qwen3_moe", ParallelLayout(4, ep=2, pp=2, rollout_tp=2)),
    ],
    ids=str,
)
def test_a_refit_is_whole_or_leaves_the_engine_shut(family, grid, folders):
    """Its storage is what vLLM's own loader makes, at the same addresses, also after failures at each bucket."""
    folder = folders(family)
    model = reference(folder)
    ranks = run_ranks(grid.world_size, refits, folder, grid)
    for rank, (cost, found, said) in enumerate(ranks):
        assert cost["refit/bytes_moved"] == cost["refit/bytes_lower_bound"]
        assert found == ranks[rank - rank % grid.rollout_tp][1]
        for name, rollouts in found.items():
            assert_scored(model, rollouts, SETTINGS[name])
        assert len(said) > 4 * grid.world_size
        for why, refit, generate in said:
            assert why in refit and "weight update incomplete" in generate
