"""FP8 blocks: a refit brings vLLM what its own loader makes of an FP8 checkpoint, in the form that its kernels read.

There is no GPU: vLLM's layers for GPUs run in its build for CPUs, see `fp8_on_a_cpu.py`.
"""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from mrl.checkpoint.formats.hf import load_from_hf
from mrl.config.config import CheckpointEngineConfig, Config, ModelConfig, RolloutConfig
from mrl.distributed.groups import make_rollout_group
from mrl.engines._fp8_support import quantization_config_keys
from mrl.engines.base import SamplingConfig
from mrl.engines.vllm.fp8_support import check_gpu, refusals, unquantized_modules
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_folder
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.dtypes import allocate
from mrl.resharding.fp8 import block_grids
from mrl.resharding.megatron import megatron_layout
from mrl.resharding.weight_sync import WeightSync
from tests.engines.native.test_engine import score
from tests.engines.native.tiny import make_checkpoint, make_prompts, reference
from tests.engines.vllm import fp8_on_a_cpu, tiny
from tests.ranks import run_ranks
from tests.resharding.archs import small

MEAN_NATS = 0.6
"""Of |difference of log-probabilities| to the model that was never quantised. Measured: 0.28 dense, 0.41 with experts,
much of it from bf16; of weights that are not the model's, nats. Where each scale stands is shown by the bytes."""
SIDE = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SAMPLED = SamplingConfig(n=2, max_tokens=12, seed=3)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Family -> folder of a model, and of the same in FP8."""

    def folder(family):
        wide = {**WIDE, "moe_intermediate_size": 256} if "moe" in family else WIDE
        families = {name: {**given, **wide} for name, given in tiny.FAMILIES.items()}
        plain = make_checkpoint(tmp_path_factory.mktemp(family), family, families=families)
        return str(plain), str(quantised(plain, tmp_path_factory.mktemp(f"{family}-fp8")))

    return functools.cache(folder)


def quantised(folder, stored):
    """The same model as DeepSeek and transformers store it in FP8, made without mrl's code."""
    arch = arch_from_folder(folder)
    tensors = {}
    for name, value in load_file(Path(folder) / "model.safetensors").items():
        if name not in block_grids(arch, "fp8"):
            tensors[name] = value
            continue
        value = value.bfloat16().float()  # as the actor has it
        blocks = value.unfold(0, SIDE, SIDE).unfold(1, SIDE, SIDE)
        factors = LARGEST / blocks.abs().amax((-1, -2))
        grown = factors.repeat_interleave(SIDE, 0).repeat_interleave(SIDE, 1)
        tensors[name] = (value * grown).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = factors.reciprocal()
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    config = json.loads((Path(folder) / "config.json").read_text())
    fp8 = quantization_config_keys(RolloutConfig(quantization="fp8"), unquantized_modules=unquantized_modules(arch))
    (stored / "config.json").write_text(json.dumps(config | fp8))
    return stored


def engine_of(folder, arch, tp_group):
    return tiny.engine(folder, arch=arch, tp_group=tp_group, dtype=torch.bfloat16, quantization="fp8")


def refitted(plain, stored, grid):
    """Both stores, and samples after the refit."""
    from mrl.engines.vllm import engine as module
    from mrl.engines.vllm import llm_runtime

    fp8_on_a_cpu.install()
    module.refusals_on_a_cpu = lambda _: ()
    original, arch = llm_runtime.arguments, arch_from_folder(plain)
    if arch.moe is not None:  # as on a GPU
        llm_runtime.arguments = lambda *args: {**original(*args), "moe_backend": "triton"}
    group = make_rollout_group(grid, dist.get_rank())
    made = llm_runtime.arguments
    llm_runtime.arguments = lambda *args: {**made(*args), "load_format": "auto"}
    with engine_of(stored, arch, group) as engine:
        expected = {name: value.data.clone() for name, value in engine._runtime.model().named_parameters()}
    llm_runtime.arguments = made
    layout = megatron_layout(arch, grid, dist.get_rank(), dtype="bfloat16", te=False)
    sources = allocate(layout)
    load_from_hf(plain, arch, layout, sources)
    with engine_of(stored, arch, group) as engine:
        model = engine._runtime.model()
        addresses = {name: value.data_ptr() for name, value in model.named_parameters()}
        refit = WeightSync(layout, sources, engine, CheckpointEngineConfig(1), block_grids(arch, "fp8"))
        for version in range(2):
            cost = refit(version)
        for name, value in model.named_parameters():
            assert value.dtype == expected[name].dtype, name
            assert torch.equal(value.float(), expected[name].float()), name
            assert value.data_ptr() == addresses[name], name
        return cost, {str(value.dtype) for value in expected.values()}, engine.generate(make_prompts((9, 20)), SAMPLED)


@pytest.mark.vllm
@pytest.mark.usefixtures("vllm_ranks")
@pytest.mark.parametrize(
    ("family", "grid"),
    [("qwen3", ParallelLayout(2, rollout_tp=2)), ("qwen3_moe", ParallelLayout(2, tp=2, rollout_tp=2))],
    ids=str,
)
def test_a_refit_brings_what_its_own_loader_makes_of_an_fp8_checkpoint(family, grid, pairs):
    plain, stored = pairs(family)
    model = reference(plain)
    for cost, dtypes, rollouts in run_ranks(grid.world_size, refitted, plain, stored, grid):
        assert cost["refit/bytes_moved"] == cost["refit/bytes_lower_bound"]
        assert dtypes == {"torch.float8_e4m3fn", "torch.float32", "torch.bfloat16"}
        told = torch.cat([torch.tensor(rollout.rollout_logprobs) for rollout in rollouts])
        scored = torch.cat([score(model, rollout) for rollout in rollouts])
        assert (told - scored).abs().mean() < MEAN_NATS


WHOLE = small(
    "qwen3_tiny", hidden_size=256, intermediate_size=512, head_dim=64, num_attention_heads=8, num_key_value_heads=4
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"dtype": "float32"}, "rollout.dtype=float32: vLLM multiplies FP8 weights with bfloat16 only"),
        (
            {"tensor_model_parallel_size": 4},
            "num_key_value_heads x head_dim / rollout.tensor_model_parallel_size = 256 / 4 = 64",
        ),
        ({"name": "native", "dtype": "float32"}, None),
    ],
)
def test_models_and_replicas_that_it_cannot_hold_are_refused(changes, said):
    rollout = replace(RolloutConfig(name="vllm", quantization="fp8", dtype="bfloat16"), **changes)
    found = list(refusals(Config(model=ModelConfig(dtype="bfloat16"), rollout=rollout), WHOLE))
    assert found == [] if said is None else said in found[0]


def test_gpus_without_fp8_are_refused():
    check_gpu((8, 9))
    check_gpu((9, 0))
    with pytest.raises(UserError, match="compute capability 8.6"):
        check_gpu((8, 6))
