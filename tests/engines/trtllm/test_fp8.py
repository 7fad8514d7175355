"""FP8 blocks on the LLM API: what arrives, what is multiplied with, and what the start refuses."""

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mrl.commands.plan.dryrun import refit_plan
from mrl.config.config import Config, ModelConfig
from mrl.distributed.groups import make_rollout_group
from mrl.engines._capabilities import memory_plan
from mrl.engines.native.engine import NativeEngine
from mrl.engines.trtllm import fp8_support
from mrl.errors import UserError
from mrl.parallel_layout import ParallelLayout
from mrl.resharding import fp8
from mrl.resharding import fp8_quantize as functional
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.megatron import megatron_layout
from mrl.resharding.random_init import random_init
from mrl.resharding.weight_sync import WeightSync
from mrl.trainer.validation.validate import check
from tests.engines.specs import spec_of
from tests.engines.trtllm import tiny
from tests.engines.trtllm.conftest import FAULTS, STANDIN, forget
from tests.engines.trtllm.mpi_ranks import run_mpi
from tests.engines.trtllm.signature import FLAVOUR_VARIABLE
from tests.ranks import run_ranks
from tests.resharding.archs import small
from tests.resharding.test_fp8 import bits, whole_tensors
from tests.trainer.validation.runs import make

WIDE = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 14,
}  # fmt: skip
"""Whole blocks on one rank and on two."""
MODELS = {
    "dense": small("qwen2_tiny", **WIDE),
    "experts": small("qwen2_moe_tiny", **WIDE, moe_intermediate_size=128, shared_expert_intermediate_size=256),
}
TOLERANCE = 0.02
"""Nats: log-probabilities of one forward over the sequence against token by token, where a CPU computes in bfloat16."""
FP8_CACHE = {"trtllm": {"kv_cache_config": {"dtype": "fp8"}}}
BF16 = {"dtype": torch.bfloat16, "quantization": "fp8"}


def refitted(folder, arch):
    """After the same refit: what differs of the weights, the start's quantisation, bytes, rollouts of both engines."""
    sys.path.insert(0, str(STANDIN))
    os.environ[FLAVOUR_VARIABLE] = "1.3"
    forget()
    try:
        layout = megatron_layout(arch, ParallelLayout(1), dist.get_rank(), dtype="float32", te=False)
        sources, grids = allocate(layout), fp8.block_grids(arch, "fp8")
        random_init(arch, layout, sources, 7)
        native = NativeEngine(
            spec_of(
                tiny.rollout(name="native", quantization="fp8", gpu_memory_utilization=0.02),
                arch,
                dtype=torch.bfloat16,
                decode=tiny.TOKENIZER.decode,
            )
        )
        with tiny.engine(Path(folder), arch, **BF16, engine_kwargs=FP8_CACHE) as llm:
            for version in range(2):
                told = WeightSync(layout, sources, llm, tiny.BUCKET, grids)(version)
            WeightSync(layout, sources, native, tiny.BUCKET, grids)(0)
            model = llm._runtime.executor.model_engine.model
            given = model.tensors
            expected = {name: stored for name, (stored, _) in whole_tensors(arch, "fp8").items() if name in grids}
            differ = [name for name, tensor in expected.items() if not torch.equal(bits(given[name]), bits(tensor))]
            assert len(model.buckets) > 1
            told["arrived"] = sum(tensor.nbytes for tensor in given.values())
            samples = [engine.generate(tiny.PROMPTS, tiny.SAMPLING) for engine in (llm, native)]
            started = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
            return [differ, started, told, *samples]
    finally:
        sys.path.remove(str(STANDIN))
        del os.environ[FLAVOUR_VARIABLE]
        forget()


@pytest.mark.parametrize("model", MODELS)
def test_samples_and_their_log_probabilities_are_the_native_engines_under_the_same_fp8_weights(tmp_path, model):
    arch = MODELS[model]
    ((differ, started, told, ours, theirs),) = run_ranks(1, refitted, str(tmp_path), arch)
    assert differ == []
    assert (started["quant_method"], started["weight_block_size"]) == ("fp8", list(fp8.BLOCK))
    config = Config(model=ModelConfig(dtype="float32"), rollout=tiny.rollout(dtype="bfloat16", quantization="fp8"))
    plan = refit_plan(config, arch, ParallelLayout(1))
    assert (plan.bytes_local, plan.bytes_moved) == (told["refit/bytes_local"], told["refit/bytes_moved"])
    assert (
        memory_plan(config).arriving_bytes(config, arch, ParallelLayout(1))
        == told["arrived"]
        == plan.bytes_local + told["refit/bytes_scales"]
    )
    assert [one.response_ids for one in ours] == [one.response_ids for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=TOLERANCE)


@pytest.fixture
def newer(standin):
    """The stand-in of 1.3."""
    standin.setenv(FLAVOUR_VARIABLE, "1.3")
    forget()
    return standin


def over_mpi(folder, arch, rollout):
    """What rank 0's replica multiplies with that is not what FP8 stands for; why it fails, where modules read more."""
    rank = dist.get_rank()
    grid = ParallelLayout(2, tp=2, rollout_tp=2, rollout_ep=rollout.get("expert_parallel_size", 1))
    layout = megatron_layout(arch, grid, rank, dtype="float32", te=False)
    sources, grids = allocate(layout), fp8.block_grids(arch, "fp8")
    random_init(arch, layout, sources, 7)
    group, settings = make_rollout_group(grid, rank), {"tensor_model_parallel_size": 2, "timeout_s": 20.0, **rollout}
    with tiny.engine(Path(folder) / str(rank), arch, tp_group=group, **BF16, **settings) as engine:
        WeightSync(layout, sources, engine, tiny.BUCKET, grids)(0)
        engine.generate(tiny.PROMPTS, tiny.SAMPLING)
        differ = []
        if rank == 0:
            held = engine._runtime.executor._whole()
            meant = {name: tensor for name, (_, tensor) in whole_tensors(arch, "fp8").items()}
            differ = [name for name in grids if not torch.equal(held[name], meant[name])]
    os.environ[FAULTS] = "reads_more"
    again = tiny.engine(Path(folder) / f"{rank} more", arch, tp_group=group, **BF16, **settings)
    with again as engine, pytest.raises(RuntimeError) as caught:
        WeightSync(layout, sources, engine, tiny.BUCKET, grids)(0)
    del os.environ[FAULTS]
    return differ, str(caught.value)


def all_over_mpi(folder):
    found = [over_mpi(Path(folder) / "dense", MODELS["dense"], {})]
    return [*found, over_mpi(Path(folder) / "experts", MODELS["experts"], {"expert_parallel_size": 2})]


@pytest.mark.mpi
def test_a_replica_of_two_ranks_multiplies_with_what_fp8_stands_for(tmp_path):
    for results in run_mpi(2, all_over_mpi, str(tmp_path), **{FLAVOUR_VARIABLE: "1.3"}):
        for differ, said in results:
            assert differ == []
            assert "self_attn.o_proj.weight' contains values that are not finite" in said


def refusal(folder, **settings):
    """Why an engine in FP8 does not start; "" where it does."""
    try:
        with tiny.engine(folder, MODELS["dense"], **BF16, **settings):
            return ""
    except UserError as error:
        return str(error)


def test_a_version_that_loads_fp8_at_its_start_only_is_refused(standin, tmp_path):
    said = refusal(tmp_path)
    assert "1.2.1 loads FP8 weights at its start only" in said and "has no allow_partial_loading" in said


def test_graphs_are_refused_where_a_refit_moves_what_they_captured(newer, tmp_path):
    assert refusal(tmp_path) == ""
    newer.setenv(FAULTS, "graphs_stale")
    assert "to another address" in refusal(tmp_path)
    assert refusal(tmp_path, enforce_eager=True) == ""


def test_a_start_without_the_quantisation_is_seen(newer, tmp_path):
    newer.setattr("mrl.engines.trtllm.engine.quantization_config_keys", lambda rollout: {})
    elements = sum(math.prod(grid.shape) for grid in fp8.block_grids(MODELS["dense"], "fp8").values())
    assert f"started with 0 elements in FP8 on rank 0 of its replica, but a weight sync sends {elements}" in refusal(
        tmp_path
    )


@pytest.fixture
def model(newer):
    """The stand-in's model of 1.3 in FP8, and what fills it."""
    from tensorrt_llm._torch.pyexecutor.model_loader import Model

    arch = MODELS["dense"]
    one = {"tensor_parallel_size": 1, "moe_expert_parallel_size": None, "moe_tensor_parallel_size": None}
    made = Model(arch, SimpleNamespace(dtype="bfloat16", **one), quantized=True)
    made.pre_reload_weights()
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in made.wanted.items()}
    return made, tensors


WRONG = {
    "no scales": lambda name, scales, tensors: {name: tensors[name]},
    "one scale for the matrix": lambda name, scales, tensors: tensors | {scales: torch.ones(())},
    "scales of another block": lambda name, scales, tensors: tensors | {scales: torch.ones(4, 2)},
    "scales in bfloat16": lambda name, scales, tensors: tensors | {scales: tensors[scales].bfloat16()},
    "weights in bfloat16": lambda name, scales, tensors: tensors | {name: tensors[name].bfloat16()},
    "a scale of activations": lambda name, scales, tensors: tensors | {name[:-6] + "input_scale": torch.tensor(0.5)},
}


@pytest.mark.parametrize("what", WRONG)
def test_the_stand_in_refuses(model, what):
    from tensorrt_llm.faults import StandInError

    made, tensors = model
    name = "model.layers.1.self_attn.o_proj.weight"
    with pytest.raises(StandInError):
        made.load_weights(WRONG[what](name, name + fp8.SCALES, tensors), allow_partial_loading=True)
        made.process_weights_after_loading()


def loaded(arch, tp, ep):
    """What the stand-in's ranks multiply with, of weights that FP8 stands for; and these."""
    from tensorrt_llm._torch.modules.linear import Mapping, modules_of

    whole, layout = whole_tensors(arch, "fp8"), hf_layout(arch, "float32")
    given = allocate(layout)
    random_init(arch, layout, given, 7)
    found, expected, tensors = {}, {}, {}
    for name, grid in fp8.block_grids(arch, "fp8").items():
        stored, expected[name] = whole[name]
        tensors[name], found[name] = stored.view(torch.uint8), torch.full(stored.shape, torch.nan)
        largest = functional.block_magnitudes(given[name], (0, 0), grid.block)
        tensors[name + fp8.SCALES] = functional.multipliers(largest).reciprocal()
    args = SimpleNamespace(tensor_parallel_size=tp, moe_expert_parallel_size=ep, moe_tensor_parallel_size=None)
    for rank in range(tp):
        for module in modules_of(arch, layout, Mapping(args, rank)).values():
            module.wanted = [name for name in module.wanted if name in tensors]
            if not module.wanted or not module.quantize(layout):
                continue
            names = [*module.wanted, *(name + fp8.SCALES for name in module.wanted)]
            shards = {name: module.shard(name, tensors[name]).contiguous() for name in names}
            shards |= {name: shards[name].view(torch.float8_e4m3fn) for name in module.wanted}
            for name, values in module.meant(shards).items():
                places = module.shard(name, torch.arange(found[name].numel()).view(found[name].shape))
                found[name].view(-1)[places.reshape(-1)] = values.reshape(-1)
    return found, expected


TP = "rollout.tensor_model_parallel_size"
MOE = {**WIDE, "head_dim": 64, "moe_intermediate_size": 128}
CUTS = [
    # preset, sizes, tp, ep, what the rule names
    ("qwen2_tiny", WIDE, 2, 1, ""),
    ("qwen3_tiny", {**WIDE, "hidden_size": 320, "head_dim": 64}, 1, 1, "hidden_size = 320"),
    ("qwen2_tiny", {**WIDE, "intermediate_size": 320}, 1, 1, "intermediate_size = 320"),
    ("qwen2_tiny", {**WIDE, "intermediate_size": 384}, 2, 1, f"intermediate_size / {TP} = 384 / 2 = 192"),
    ("qwen2_tiny", {**WIDE, "num_key_value_heads": 2}, 2, 1, f"num_key_value_heads x head_dim / {TP} = 128 / 2 = 64"),
    (
        "llama_tiny",
        {**WIDE, "hidden_size": 512, "num_key_value_heads": 1},
        2,
        1,
        "the same heads, but not their scales",
    ),
    ("phi3_tiny", WIDE, 1, 1, "without their scales"),
    ("qwen3_moe_tiny", {**MOE, "head_dim": 128, "num_key_value_heads": 1}, 2, 2, ""),
    ("qwen3_moe_tiny", MOE, 2, 2, ""),
    ("qwen3_moe_tiny", MOE, 2, 1, f"an expert's width / ({TP} / rollout.expert_parallel_size) = 128 / 2 = 64"),
]


@pytest.mark.parametrize(("preset", "sizes", "tp", "ep", "said"), CUTS)
def test_what_the_rule_lets_through_is_what_the_loaders_get_right(standin, preset, sizes, tp, ep, said):
    arch = small(preset, **sizes)
    config = make(
        "rollout.name=trtllm", "rollout.quantization=fp8", "rollout.dtype=bfloat16",
        "algorithm.rollout_correction.preset=decoupled_token_is",
        f"rollout.tensor_model_parallel_size={tp}", f"rollout.expert_parallel_size={ep}",
    )  # fmt: skip
    told = list(fp8_support.refusals(config, arch))
    if not said:
        assert told == []
        found, expected = loaded(arch, tp, ep)
        assert found.keys() == expected.keys()
        assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
        return
    assert any(said in one for one in told), told
    if "hidden_size = " not in said:  # its last block may be smaller; kernels want whole ones
        from tensorrt_llm.faults import StandInError

        with pytest.raises((StandInError, AssertionError)):
            found, expected = loaded(arch, tp, ep)
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_side_of_a_block_is_the_engines():
    assert fp8.BLOCK == (fp8_support.SIDE, fp8_support.SIDE)


def test_a_run_in_another_dtype_is_refused():
    words = (
        "rollout.name=trtllm",
        "rollout.quantization=fp8",
        "rollout.dtype=float32",
        "algorithm.rollout_correction.preset=decoupled_token_is",
    )
    config = make(*words)
    with pytest.raises(UserError, match="multiplies FP8 weights with bfloat16 only. Set rollout.dtype=bfloat16"):
        check(config, MODELS["dense"], 1, 14)
