"""Refit through the real transport into the LLM API's engine: what arrives, and in how much memory."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mrl.config.config import CheckpointEngineConfig
from mrl.parallel_layout import ParallelLayout
from mrl.resharding import buckets
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.megatron import megatron_layout
from mrl.resharding.random_init import random_init
from mrl.resharding.weight_sync import WeightSync
from tests.engines.trtllm import tiny
from tests.engines.trtllm.conftest import FAULTS, STANDIN, forget
from tests.ranks import run_ranks
from tests.resharding.archs import small

MIB = 1 << 20
WIDE = small("qwen2_tiny", hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
"""Tensors of up to 1 MiB, 32 MiB in all."""
MOE = small("qwen3_moe_tiny")


def refits(folder, arch, grid, megabytes):
    """The staging's peak, and the sizes of what the stand-in's `reload` was given on this rank.

    `megabytes`: Of the transport's buckets; the engine's have 1 MiB.
    """
    sys.path.insert(0, str(STANDIN))
    forget()
    smallest, buckets.MIN_ROUND_BYTES = buckets.MIN_ROUND_BYTES, MIB  # a round is large against these models
    try:
        layout = megatron_layout(arch, grid, dist.get_rank(), dtype="float32", te=False)
        sources = allocate(layout)
        with tiny.engine(Path(folder) / str(dist.get_rank()), arch) as engine:
            transport = CheckpointEngineConfig(update_weights_bucket_megabytes=megabytes)
            refit = WeightSync(layout, sources, engine, transport)
            for version in range(2):
                random_init(arch, layout, sources, version)
                refit(version)
            model = engine._runtime.executor.model_engine.model
            expected = allocate(hf_layout(arch, "float32"))
            random_init(arch, hf_layout(arch, "float32"), expected, 1)
            assert sorted(model.tensors) == sorted(expected)
            for name, tensor in expected.items():
                assert torch.equal(model.tensors[name], tensor), name
            sizes = [sum(expected[name].nbytes for name in bucket) for bucket in model.buckets]
            return engine._assembler.peak_bytes, sizes, engine.policy_version
    finally:
        buckets.MIN_ROUND_BYTES = smallest
        sys.path.remove(str(STANDIN))
        forget()


@pytest.mark.parametrize(
    "arch, grid, megabytes",
    [
        (WIDE, ParallelLayout(2, 2), 1),
        (WIDE, ParallelLayout(2, 2), 16),
        (WIDE, ParallelLayout(2, 1, 2), 16),
        (MOE, ParallelLayout(2, 2, ep=2, etp=1), 1),
    ],
    ids=["tp2", "tp2, large buckets", "pp2, large buckets", "moe tp2 ep2"],
)
def test_whole_tensors_arrive_bit_by_bit_in_bounded_staging(tmp_path, arch, grid, megabytes):
    total = sum(tensor.nbytes for tensor in allocate(hf_layout(arch, "float32")).values())
    for peak, sizes, version in run_ranks(2, refits, str(tmp_path), arch, grid, megabytes):
        assert sum(sizes) == total and version == 1
        assert max(sizes) <= 2 * MIB  # a bucket and the tensor that filled it
        # the engine's bucket, what a round (1/8 of what is sent) completes together with the rank's own part, a tensor,
        # and a block of the transport, which hands them over block by block
        assert peak <= 8 * MIB < total or total < MIB, (peak, total)


def breaks(folder, arch, grid, name):
    """The messages of a refit in which `reload` fails on rank 1, of a sample after it, and of another refit."""
    sys.path.insert(0, str(STANDIN))
    forget()
    try:
        layout = megatron_layout(arch, grid, dist.get_rank(), dtype="float32", te=False)
        sources = allocate(layout)
        random_init(arch, layout, sources, 0)
        with tiny.engine(Path(folder) / str(dist.get_rank()), arch) as engine:
            refit = WeightSync(layout, sources, engine, CheckpointEngineConfig(update_weights_bucket_megabytes=1))
            refit(0)
            os.environ[FAULTS] = f"reload={name}" if dist.get_rank() == 1 else ""
            try:
                return [_failure(lambda: refit(1)), _failure(lambda: engine.generate(tiny.PROMPTS, tiny.SAMPLING))]
            finally:
                del os.environ[FAULTS]
    finally:
        sys.path.remove(str(STANDIN))
        forget()


def _failure(call):
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


def test_a_refit_that_fails_on_one_rank_names_the_bucket_on_all_and_shuts_every_engine(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    for refit, sample in run_ranks(2, breaks, str(tmp_path), small("qwen2_tiny"), ParallelLayout(2, 2), name):
        assert "rank 1 failed: " in refit and "TensorRT-LLM rejected bucket 1 of the weight sync, 'model." in refit
        assert f"shape mismatch in {name}" in refit
        assert "weight update incomplete" in sample
