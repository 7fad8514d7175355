"""What arrives at TensorRT-LLM in a refit equals, byte for byte, what the converters write for the same weights."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mrl.checkpoint.formats.hf import HfSource, HfTarget, load_from_hf
from mrl.checkpoint.formats.megatron import MegatronSource, MegatronTarget
from mrl.checkpoint.formats.trtllm import TrtllmTarget
from mrl.commands.convert.convert import convert
from mrl.config.config import CheckpointEngineConfig, RolloutConfig
from mrl.distributed.groups import make_rollout_group
from mrl.engines.trtllm.trt_engine import BuiltEngine
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.dtypes import allocate
from mrl.resharding.megatron import megatron_layout
from mrl.resharding.trtllm import TrtllmMapping
from mrl.resharding.weight_sync import WeightSync
from tests.checkpoint.formats.test_hf import write_folder
from tests.engines.specs import spec_of
from tests.engines.trtllm import tiny
from tests.engines.trtllm.conftest import STANDIN, forget
from tests.engines.trtllm.engines import build_engines
from tests.engines.trtllm.mpi_ranks import run_mpi
from tests.ranks import run_ranks
from tests.resharding.archs import small

MIB = CheckpointEngineConfig(update_weights_bucket_megabytes=1)
MOE = {"num_key_value_heads": 2, "moe_intermediate_size": 16}
MODELS = {
    "dense": small("qwen2_tiny", num_hidden_layers=4),
    "dense, untied": small("llama_tiny", num_hidden_layers=4, num_key_value_heads=2),
    "moe": small("qwen3_moe_tiny", **MOE),
    "moe, shared expert": small("qwen2_moe_tiny", **MOE),
}
ACTORS = {
    "dense": ParallelLayout(4, tp=2, pp=2),
    "dense, untied": ParallelLayout(4, tp=2, pp=2),
    "moe": ParallelLayout(4, pp=2, ep=2),
    "moe, shared expert": ParallelLayout(4, tp=2, pp=2, ep=2, etp=1),
}
ENGINES = {
    # of one replica, and the dtype
    "dense": (TrtllmMapping(2, 2), "bfloat16"),
    "dense, untied": (TrtllmMapping(2, use_parallel_embedding=True), "float32"),
    "moe": (TrtllmMapping(2, moe_ep_size=2), "bfloat16"),
    "moe, shared expert": (TrtllmMapping(4, moe_ep_size=2), "float32"),
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """For each model: a Hugging Face folder, and the converters' files made from a Megatron checkpoint of it."""
    folders = {}
    for name, arch in MODELS.items():
        root = tmp_path_factory.mktemp("converted")
        (root / "hf").mkdir()
        write_folder(arch, root / "hf")
        mapping, dtype = ENGINES[name]
        with HfSource(root / "hf") as source:
            convert(source, MegatronTarget(arch, ACTORS[name], "float32"), root / "megatron")
        with MegatronSource(root / "megatron") as source:
            convert(source, TrtllmTarget(arch, mapping, dtype), root / "trtllm")
            convert(source, HfTarget(arch, "float32"), root / "again")
        folders[name] = root
    return folders


def actor(arch, grid, folder):
    """This rank's Megatron tensors."""
    layout = megatron_layout(arch, grid, dist.get_rank(), dtype="float32", te=False)
    tensors = allocate(layout)
    load_from_hf(folder / "hf", arch, layout, tensors)
    return layout, tensors


def equal(found, expected):
    """Names whose bytes differ."""
    names = found.keys() ^ expected.keys()
    for name in found.keys() & expected.keys():
        ours, theirs = found[name].contiguous(), expected[name].contiguous()
        same = torch.equal(ours.view(torch.uint8).flatten(), theirs.view(torch.uint8).flatten())
        if ours.dtype != theirs.dtype or not same:
            names.add(name)
    return sorted(names)


def refits_built_engines(cases):
    """Each case's weights that differ between this rank's engine and its file."""
    differ = {}
    for name, (arch, grid, mapping, dtype, root) in cases.items():
        grid = ParallelLayout(**{**vars(grid), "rollout_tp": mapping.tp_size, "rollout_pp": mapping.pp_size})
        config = RolloutConfig(
            engine_dir=str(root / "engines"), prompt_length=8, response_length=8, gpu_memory_utilization=0.01
        )
        group = make_rollout_group(grid, dist.get_rank())
        engine = BuiltEngine(spec_of(config, arch, tp_group=group, dtype=getattr(torch, dtype)))
        WeightSync(*actor(arch, grid, root), engine, MIB)(1)
        from tensorrt_llm.builder import packed

        file = load_file(root / "trtllm" / f"rank{grid.rollout_rank(dist.get_rank())}.safetensors")
        held = engine._runner.engine.weights
        differ[name] = equal(dict(held), packed(file)), len(held)
        engine.close()
    return differ


@pytest.mark.mpi
def test_the_refitters_weights_are_those_of_the_converters_files(converted, standin):
    cases = {}
    for name, arch in MODELS.items():
        mapping, dtype = ENGINES[name]
        build_engines(converted[name], arch, mapping, dtype)  # of other weights
        cases[name] = (arch, ACTORS[name], mapping, dtype, converted[name])
    for differ in run_mpi(4, refits_built_engines, cases):
        assert differ.keys() == MODELS.keys()
        for name, (wrong, count) in differ.items():
            assert wrong == [] and count > 10, name


def refits_llm_api(cases):
    sys.path.insert(0, str(STANDIN))
    forget()
    try:
        differ = {}
        for name, (arch, grid, root) in cases.items():
            with tiny.engine(root / f"rank{dist.get_rank()}", arch) as engine:
                WeightSync(*actor(arch, grid, root), engine, MIB)(1)
                expected = {}
                for file in (root / "again").glob("*.safetensors"):
                    expected |= load_file(file)
                given = engine._runtime.executor.model_engine.model.tensors
                differ[name] = equal(given, expected), len(given)
        return differ
    finally:
        sys.path.remove(str(STANDIN))
        forget()


@pytest.mark.slow
def test_the_tensors_of_reload_are_those_of_the_converters_files(converted):
    cases = {name: (MODELS[name], ACTORS[name], converted[name]) for name in ("dense", "moe")}
    for differ in run_ranks(4, refits_llm_api, cases):
        for name, (wrong, count) in differ.items():
            assert wrong == [] and count > 10, name


def test_files_that_differ_are_seen(converted):
    """A check of the check."""
    file = load_file(Path(converted["dense"]) / "trtllm" / "rank0.safetensors")
    changed = {name: tensor.clone() for name, tensor in file.items()}
    name = "transformer.layers.0.attention.qkv.weight"
    changed[name].view(torch.int16)[3, 1] ^= 1
    assert equal(changed, file) == [name]
