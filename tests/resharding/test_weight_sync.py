"""The actor's shards into the native engine, over real ranks: whole, or not at all."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mrl.config.config import CheckpointEngineConfig, RolloutConfig
from mrl.distributed import shared_memory
from mrl.distributed.groups import make_rollout_group
from mrl.engines._null_engine import NullEngine
from mrl.engines.base import SamplingConfig
from mrl.engines.native.engine import NativeEngine
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.dtypes import allocate
from mrl.resharding.megatron import megatron_layout
from mrl.resharding.native import native_layout
from mrl.resharding.random_init import random_init
from mrl.resharding.regions import volume
from mrl.resharding.weight_slice import WeightSlice
from mrl.resharding.weight_sync import WeightSync
from mrl.types import Prompt
from tests.engines.specs import spec_of
from tests.ranks import run_ranks
from tests.resharding.archs import ARCHS, small
from tests.resharding.test_experts import MOE

NAME = "biases, tied"
PROMPT = Prompt(uid=0, prompt_ids=(1, 2, 3), text="")
SAMPLING = SamplingConfig(n=1, max_tokens=4, greedy=True, ignore_eos=True)


@functools.cache
def rollout_group(world, rollout_tp, rollout_ranks=0):
    """One group per layout and world: each costs threads for as long as the process lives."""
    grid = ParallelLayout(world.size(), rollout_tp=rollout_tp, rollout_ranks=rollout_ranks)
    return make_rollout_group(grid, dist.get_rank())


class Side:
    """One rank: an actor's shard with random weights and an engine."""

    def __init__(self, arch, grid, *, source_dtype="float32", target_dtype="float32", engine=NativeEngine):
        rank = dist.get_rank()
        self.arch, self.grid, self.dtype = arch, grid, target_dtype
        trains, samples = rank in grid.trainers, rank in grid.samplers
        self.layout = megatron_layout(arch, grid, rank, dtype=source_dtype, te=False) if trains else {}
        self.sources = allocate(self.layout)
        shared_memory.share(self.sources.values())  # as the actor's
        config = RolloutConfig(
            prompt_length=8,
            response_length=8,
            max_num_seqs=4,
            gpu_memory_utilization=0.01,
            expert_parallel_size=grid.rollout_ep,
        )
        group = rollout_group(dist.group.WORLD, grid.rollout_tp, grid.rollout_ranks)
        self.engine = (engine if samples else NullEngine)(
            spec_of(config, arch, tp_group=group, dtype=getattr(torch, target_dtype))
        )
        self.refit = WeightSync(
            self.layout, self.sources, self.engine, CheckpointEngineConfig(update_weights_bucket_megabytes=1)
        )

    def train_to(self, seed):
        """New weights in the same tensors."""
        random_init(self.arch, self.layout, self.sources, seed)

    def assert_engine_holds(self, seed):
        if dist.get_rank() not in self.grid.samplers:
            return
        own = native_layout(
            self.arch,
            self.grid.rollout_tp,
            self.grid.rollout_tp_rank(dist.get_rank()),
            self.dtype,
            ep_size=self.grid.rollout_ep,
        )
        expected = allocate(own)
        random_init(self.arch, own, expected, seed)
        for name, tensor in expected.items():
            assert torch.equal(self.engine._weights[name], tensor), name


def refits_twice(arch, grid, source_dtype, target_dtype):
    side = Side(arch, grid, source_dtype=source_dtype, target_dtype=target_dtype)
    weights = {} if isinstance(side.engine, NullEngine) else side.engine._weights
    addresses = [tensor.data_ptr() for tensor in weights.values()]
    for version in range(2):
        side.train_to(seed=version)
        metrics = side.refit(version)
        side.assert_engine_holds(seed=version)
        assert side.engine.policy_version == version
    assert [tensor.data_ptr() for tensor in weights.values()] == addresses
    return metrics


ROLES = [
    (2, ParallelLayout(2, rollout_ranks=1)),
    (3, ParallelLayout(3, tp=2, rollout_ranks=1)),
    (3, ParallelLayout(3, rollout_tp=2, rollout_ranks=2)),
    (4, ParallelLayout(4, pp=2, rollout_tp=2, rollout_ranks=2)),
    (4, ParallelLayout(4, rollout_ranks=2)),
]


@pytest.mark.parametrize("name", [NAME, "q/k norm, head_dim apart, tied"])
@pytest.mark.parametrize(("size", "grid"), ROLES, ids=str)
def test_ranks_that_train_send_and_those_that_sample_receive(name, size, grid):
    arch = ARCHS[name]
    for metrics in run_ranks(size, refits_twice, arch, grid, "float32", "float32"):
        assert metrics["refit/bytes_moved"] == metrics["refit/bytes_lower_bound"]
        assert metrics["refit/bytes_local"] == 0
        stored = sum(
            4 * volume(piece.dst)
            for rank in range(grid.rollout_size)
            for tensor in native_layout(arch, grid.rollout_tp, rank, "float32").values()
            for piece in tensor.pieces
        )
        assert metrics["refit/bytes_moved"] == grid.num_replicas * stored


def syncs_without_buffers(arch, grid):
    """Bytes of this rank's staging buffers after each sync and after they were freed."""
    side, found = Side(arch, grid), []
    side.refit._transfer._share = False  # messages, as between hosts
    for version in range(2):
        side.train_to(seed=version)
        side.refit(version)
        side.assert_engine_holds(seed=version)
        found.append(side.refit._transfer.staging_bytes)
        side.refit.free_buffers()
        found.append(side.refit._transfer.staging_bytes)
    return found


def test_freed_buffers_are_allocated_again():
    for first, freed, second, again in run_ranks(2, syncs_without_buffers, ARCHS[NAME], ParallelLayout(2, tp=2)):
        assert first == second > freed == again == 0


def test_a_rank_without_an_engine_takes_nothing():
    with pytest.raises(RuntimeError, match="'w' was sent to a rank without an engine"):
        NullEngine(spec_of(RolloutConfig(), ARCHS[NAME])).update_weights([WeightSlice("w", ((0, 1),), torch.zeros(1))])


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize(
    "grid",
    [
        ParallelLayout(4, 2, 2, 1, rollout_tp=1),
        ParallelLayout(4, 1, 2, 2, rollout_tp=2),
        ParallelLayout(4, 2, 1, 1, rollout_tp=4),
    ],
    ids=str,
)
def test_the_engine_holds_the_actors_weights_in_place(name, grid):
    for metrics in run_ranks(4, refits_twice, ARCHS[name], grid, "float32", "float32"):
        assert metrics["refit/bytes_moved"] == metrics["refit/bytes_lower_bound"] > 0
        assert metrics["refit/gb_per_s"] > 0


EXPERT_PAIRS = [
    # of the actor (tp, ep, etp ...) -> of the engine (rollout_tp, rollout_ep)
    ParallelLayout(4),
    ParallelLayout(4, ep=4),
    ParallelLayout(4, ep=4, rollout_tp=4),
    ParallelLayout(4, ep=2, rollout_tp=2, rollout_ep=2),
    ParallelLayout(4, ep=2, etp=2, rollout_tp=4, rollout_ep=4),
    ParallelLayout(4, ep=2, rollout_tp=4, rollout_ep=2),
    ParallelLayout(4, 2, rollout_tp=2, rollout_ep=2),
    ParallelLayout(4, 4, rollout_tp=4, rollout_ep=4),
    ParallelLayout(4, 4, ep=4, etp=1, rollout_tp=4),
    ParallelLayout(4, 2, ep=2, etp=1, rollout_tp=4, rollout_ep=2),
    ParallelLayout(4, 2, ep=2, etp=2, rollout_tp=2),
    ParallelLayout(4, 2, ep=4, etp=1, rollout_tp=2, rollout_ep=2),
    ParallelLayout(4, 1, 2, ep=2, rollout_tp=2, rollout_ep=2),
    ParallelLayout(4, 2, 2, ep=2, etp=1, rollout_tp=4, rollout_ep=4),
    ParallelLayout(4, 1, 2, 2, ep=2, rollout_tp=4, rollout_ep=2),
    ParallelLayout(4, 2, cp=2, ep=2, rollout_tp=2),
]


ALIGNED = [ParallelLayout(4), *(ParallelLayout(4, ep=2, rollout_tp=tp, rollout_ep=2) for tp in (2, 4))]
"""Each rank of the actor holds what its engine wants."""


def refits_each(arch, grids):
    return [refits_twice(arch, grid, "float32", "float32") for grid in grids]


@pytest.mark.slow
@pytest.mark.parametrize("name", MOE)
def test_experts_spread_or_cut_fill_engines_that_spread_or_cut_them(name):
    arch = replace(MOE[name], num_layers=4)
    for metrics in run_ranks(4, refits_each, arch, EXPERT_PAIRS):
        for grid, found in zip(EXPERT_PAIRS, metrics, strict=True):
            assert found["refit/bytes_moved"] == found["refit/bytes_lower_bound"], grid
            assert (found["refit/bytes_moved"] == 0) == (grid in ALIGNED), grid


def test_a_stack_of_experts_larger_than_the_bucket_is_split():
    """4 experts of 1.5 MiB in one tensor of the engine, each a tensor of the actor, through buffers of 1 MiB."""
    arch = replace(small("qwen3_moe_tiny", hidden_size=128, moe_intermediate_size=1536), num_layers=1)
    refits = run_ranks(2, refits_each, arch, [ParallelLayout(2, ep=2), ParallelLayout(2, ep=2, rollout_tp=2)])
    assert all(found["refit/bytes_moved"] > 0 for metrics in refits for found in metrics)


def test_an_actor_in_float32_fills_an_engine_in_bfloat16():
    full = run_ranks(2, refits_twice, ARCHS[NAME], ParallelLayout(2, 2), "float32", "float32")
    half = run_ranks(2, refits_twice, ARCHS[NAME], ParallelLayout(2, 2), "float32", "bfloat16")
    for key in ("refit/bytes_moved", "refit/bytes_local", "refit/bytes_lower_bound"):
        assert half[0][key] == full[0][key] / 2


def test_one_rank_moves_nothing():
    metrics = run_ranks(1, refits_twice, ARCHS[NAME], ParallelLayout(1), "float32", "float32")[0]
    assert metrics["refit/bytes_moved"] == metrics["refit/bytes_lower_bound"] == 0
    assert metrics["refit/bytes_local"] > 0


def test_a_tensor_larger_than_the_bucket_is_split():
    """Embeddings of 8 MiB through buffers of 1 MiB."""
    arch = small("qwen2_tiny", hidden_size=128, vocab_size=16384, num_hidden_layers=2)
    run_ranks(2, refits_twice, arch, ParallelLayout(2, 1, 2), "float32", "float32")


class Failing(NativeEngine):
    """The engine of rank 1 fails when it has half of its weights while `broken`."""

    broken = False

    def update_weights(self, bucket):
        if self.broken and dist.get_rank() == 1 and len(bucket) > 5:
            super().update_weights(bucket[: len(bucket) // 2])
            raise OSError("no room")
        super().update_weights(bucket)


class Losing(NativeEngine):
    """The engine of rank 1 forgets one tensor while `broken`."""

    broken = False

    def update_weights(self, bucket):
        lost = "layers.1.down" if self.broken and dist.get_rank() == 1 else None
        super().update_weights([item for item in bucket if item.name != lost])


class Unfinished(NativeEngine):
    """The engine of rank 1 cannot finish while `broken`, the others can."""

    broken = False

    def finish_update(self, policy_version):
        if self.broken and dist.get_rank() == 1:
            raise MemoryError("no room to pack")
        super().finish_update(policy_version)


def outcome(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "passed"


def breaks_and_recovers(kind):
    side = Side(ARCHS[NAME], ParallelLayout(2, 2), engine=kind)
    side.train_to(seed=0)
    side.refit(0)
    before = outcome(lambda: side.engine.generate([PROMPT], SAMPLING))
    side.train_to(seed=1)
    side.engine.broken = True
    refit = outcome(lambda: side.refit(1))
    during = outcome(lambda: side.engine.generate([PROMPT], SAMPLING))
    side.engine.broken = False
    again = outcome(lambda: side.refit(1))
    after = outcome(lambda: side.engine.generate([PROMPT], SAMPLING))
    side.assert_engine_holds(seed=1)
    return before, refit, during, again, after


@pytest.mark.parametrize(
    "kind, named",
    [
        (Failing, ["rank 1 failed", "writing 'embed' to 'final_norm'", "no room"]),
        (Losing, ["rank 1 failed", "a write was dropped"]),
        (Unfinished, ["rank 1 failed", "no room to pack"]),
    ],
)
def test_after_a_failed_refit_no_engine_generates_until_a_whole_one(kind, named):
    for before, refit, during, again, after in run_ranks(2, breaks_and_recovers, kind):
        assert before == again == after == "passed"
        assert all(word in refit for word in named), refit
        assert during != "passed"


class Counting(NativeEngine):
    """Counts how often it is asked for the sum of all that it stores."""

    sums = 0

    def checksum(self):
        self.sums += 1
        return super().checksum()


def counts_sums():
    side = Side(ARCHS[NAME], ParallelLayout(2, 2), engine=Counting)
    side.train_to(seed=0)
    found = []
    for what in ("first", "second", "third", "fails", "after a failure", "then", "released", "last"):
        if what == "fails":
            side.engine.update_weights, kept = None, side.engine.update_weights
            outcome(lambda: side.refit(1))
            side.engine.update_weights = kept
        elif what == "released":
            side.engine.release()
            side.refit(1)
        else:
            side.refit(1)
        found.append(side.engine.sums)
    side.assert_engine_holds(seed=0)
    return found


def test_the_sum_of_all_that_is_stored_is_asked_for_in_first_refits_and_after_failures():
    for found in run_ranks(2, counts_sums):
        assert found == [1, 1, 1, 1, 2, 2, 3, 3]


def shares_storage():
    side = Side(ARCHS[NAME], ParallelLayout(2, 2))
    weights = side.engine._weights
    if dist.get_rank() == 1:
        weights["layers.1.down"] = weights["layers.0.down"]
    side.train_to(seed=0)
    return outcome(lambda: side.refit(0))


def test_a_tensor_that_lies_where_another_one_does_is_found_before_anything_is_sampled():
    for message in run_ranks(2, shares_storage):
        assert "rank 1 failed" in message
        assert "a write was dropped or overwritten" in message


def builds_with_wrong_tensors():
    side = Side(ARCHS[NAME], ParallelLayout(2, 2))
    if dist.get_rank() == 1:
        del side.sources["chunk0.decoder.final_layernorm.weight"]
    return outcome(lambda: WeightSync(side.layout, side.sources, side.engine, CheckpointEngineConfig()))


def test_a_missing_source_tensor_is_named_before_the_first_refit():
    for message in run_ranks(2, builds_with_wrong_tensors):
        assert "rank 1 failed" in message
        assert "tensor 'chunk0.decoder.final_layernorm.weight'" in message
