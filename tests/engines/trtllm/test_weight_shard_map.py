"""Refits of a replica of two ranks: each gets what its modules read of the tensors; where they do not say, all."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from mrl.config.config import CheckpointEngineConfig
from mrl.distributed.groups import make_rollout_group
from mrl.errors import UserError
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.megatron import megatron_layout
from mrl.resharding.random_init import random_init
from mrl.resharding.trtllm_reads import reading_module
from mrl.resharding.weight_sync import WeightSync
from tests.engines.trtllm import tiny
from tests.engines.trtllm.conftest import FAULTS
from tests.engines.trtllm.mpi_ranks import run_mpi
from tests.engines.trtllm.test_engine import assert_same
from tests.resharding.archs import small

BUCKET = CheckpointEngineConfig(update_weights_bucket_megabytes=1)
SIZES = {"vocab_size": 15}
"""Odd: the last rank's part of the embedding is shorter."""
MOE = small("qwen3_moe_tiny", num_key_value_heads=1, **SIZES)
SHARED = small("qwen2_moe_tiny", **SIZES)
DENSE = small("qwen2_tiny", num_key_value_heads=1, tie_word_embeddings=False, **SIZES)
"""One key/value head: both ranks read it."""
CASES = {
    "experts": (MOE, {"expert_parallel_size": 2}),
    "parts of experts": (MOE, {}),
    "shared expert": (SHARED, {"expert_parallel_size": 2}),
    "dense": (DENSE, {}),
    "fused in the file": (small("phi3_tiny", **SIZES), {}),
}


def seeded(arch, layout):
    tensors = allocate(layout)
    random_init(arch, layout, tensors, 0)
    for tensor in tensors.values():  # logits that differ: a small random model is nearly flat
        tensor.mul_(4 if tensor.dim() > 1 else 1)
    return tensors


def refitted(folder, arch, rollout):
    """(what it samples or how it failed, names that `reload` was given, bytes that ranks got, notes) of an engine."""
    rank = dist.get_rank()
    grid = ParallelLayout(2, tp=2, rollout_tp=2, rollout_ep=rollout.get("expert_parallel_size", 1))
    layout = megatron_layout(arch, grid, rank, dtype="float32", te=False)
    group = make_rollout_group(grid, rank)
    settings = {"tensor_model_parallel_size": 2, "timeout_s": 20.0, **rollout}
    with tiny.engine(Path(folder) / str(rank), arch, tp_group=group, **settings) as engine:
        refit = WeightSync(layout, seeded(arch, layout), engine, BUCKET)
        try:
            refit(0)
            found = engine.generate(tiny.PROMPTS, tiny.SAMPLING)
        except RuntimeError as error:
            found = str(error)
        given = [name for bucket in engine._runtime.executor.model_engine.model.buckets for name in bucket]
        return found, given, refit.plan.bytes_local + refit.plan.bytes_moved, engine.notes[1:]


def all_cases(folder):
    """Each case; and one with modules that tell nothing, and one that reads more than it tells."""
    found = {name: refitted(Path(folder) / name, *case) for name, case in CASES.items()}
    for fault in ("no_parts", "reads_more"):
        os.environ[FAULTS] = fault
        found[fault] = refitted(Path(folder) / fault, *CASES["experts"])
        del os.environ[FAULTS]
    return found


def num_bytes(arch):
    return sum(tensor.nbytes for tensor in allocate(hf_layout(arch, "float32")).values())


@pytest.mark.mpi
def test_a_replica_is_sent_what_its_ranks_read_and_samples_like_the_native_engine(tmp_path):
    ranks = run_mpi(2, all_cases, str(tmp_path))
    for name, (arch, rollout) in {**CASES, "no_parts": CASES["experts"]}.items():
        expected = tiny.native(seeded(arch, hf_layout(arch, "float32")), arch).generate(tiny.PROMPTS, tiny.SAMPLING)
        for rank, results in enumerate(ranks):
            found, given, sent, notes = results[name]
            assert_same(found, expected)
            experts = {expert for each in given if (expert := reading_module(each).expert) is not None}
            assert len(notes) == (name == "no_parts")
            if name == "no_parts":
                assert "tensors are sent complete to each rank of a replica" in notes[0]
                assert sorted(given) == sorted(hf_layout(arch, "float32")) and sent == 2 * num_bytes(arch)
            else:
                assert num_bytes(arch) <= sent < 1.4 * num_bytes(arch)  # twice: norms, routers, the one kv head
                all_of = range(arch.moe.num_experts) if arch.moe else range(0)
                half = len(all_of) // rollout.get("expert_parallel_size", 1)
                assert experts == set(all_of[rank * half :][:half] if half < len(all_of) else all_of)
    for results in ranks:
        assert "self_attn.o_proj.weight' contains values that are not finite" in results["reads_more"][0]


def test_an_expert_of_the_rank_that_does_not_come_shows(standin, tmp_path):
    with tiny.engine(tmp_path, MOE) as engine:
        from tensorrt_llm.faults import StandInError

        tiny.refit(engine, tiny.weights(MOE))
        executor = engine._runtime.executor
        model, loader = executor.model_engine.model, executor.model_engine.model_loader
        lost = next(name for name in engine.layout() if reading_module(name).expert == 3)
        with executor.control_action():
            model.pre_reload_weights()
            some = {name: tensor for name, tensor in tiny.weights(MOE).items() if name != lost}
            loader.reload(model, some, allow_partial_loading=True)
            with pytest.raises(StandInError, match=f"1 tensors were not loaded: {lost}"):
                model.process_weights_after_loading()


def test_a_model_that_cannot_be_staged_is_refused(standin, tmp_path):
    with tiny.engine(tmp_path, MOE) as engine:
        staged = num_bytes(MOE)
        engine._shards.check_staging(staged, 2 * staged)
        with pytest.raises(UserError, match="loads this model in one call only.* a weight sync stages 0.0 GB"):
            engine._shards.check_staging(staged, 2 * staged - 1)
