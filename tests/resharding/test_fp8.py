"""Refits into an engine in FP8: the same bytes from every layout, those of quantising whole Hugging Face tensors."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mrl.commands.plan.dryrun import refit_plan
from mrl.config.config import CheckpointEngineConfig, Config, ModelConfig, RolloutConfig
from mrl.engines._capabilities import memory_plan
from mrl.engines.base import SamplingConfig
from mrl.engines.native.engine import NativeEngine
from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout
from mrl.resharding import fp8_quantize
from mrl.resharding.dtypes import allocate
from mrl.resharding.fp8 import SCALES, block_grids
from mrl.resharding.hf import hf_layout
from mrl.resharding.megatron import megatron_layout
from mrl.resharding.native import native_layout
from mrl.resharding.random_init import random_init
from mrl.resharding.regions import full_region
from mrl.resharding.weight_slice import WeightSlice
from mrl.resharding.weight_sync import WeightSync
from mrl.types import Prompt
from tests.engines.specs import spec_of
from tests.megatron.actors import VOCAB, full_weights, make_policy, train
from tests.ranks import run_ranks
from tests.resharding.archs import filled, small
from tests.resharding.test_weight_sync import outcome, rollout_group

WIDE = {"hidden_size": 144, "intermediate_size": 208, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 40}
"""No cut of any layout falls on a block's edge, and the last blocks are smaller."""
DENSE = small("qwen2_tiny", **{key: size for key, size in WIDE.items() if key != "head_dim"})
MOE = small("qwen2_moe_tiny", **WIDE, moe_intermediate_size=136, shared_expert_intermediate_size=152)
TRAINED = arch_from_preset("qwen3_tiny", {}, VOCAB)
GRIDS = {
    "dense": (
        DENSE,
        [ParallelLayout(4, 2, 2), ParallelLayout(4, 4, rollout_tp=2), ParallelLayout(4, 1, 2, rollout_tp=4)],
    ),
    "experts": (
        MOE,
        [ParallelLayout(4, 1, 2, ep=2, rollout_tp=2), ParallelLayout(4, 2, 2, ep=2, etp=1, rollout_tp=4, rollout_ep=2)],
    ),
}


def settings(arch, quantization, grid):
    return RolloutConfig(
        prompt_length=8, response_length=8, max_num_seqs=4, gpu_memory_utilization=0.01, quantization=quantization,
        expert_parallel_size=grid.rollout_ep,
    )  # fmt: skip


def refitted(arch, grid, quantization, dtype="float32", bad=None):
    """(engine after a refit, what the refit told)"""
    layout = megatron_layout(arch, grid, dist.get_rank(), dtype=dtype, te=False)
    sources = allocate(layout)
    random_init(arch, layout, sources, seed=7)
    if bad is not None and dist.get_rank() == 1:
        next(tensor for name, tensor in sources.items() if bad in name)[0, 0] = torch.nan
    group = rollout_group(dist.group.WORLD, grid.rollout_tp)
    engine = NativeEngine(
        spec_of(settings(arch, quantization, grid), arch, tp_group=group, dtype=getattr(torch, dtype))
    )
    refit = WeightSync(layout, sources, engine, CheckpointEngineConfig(1), block_grids(arch, quantization))
    return engine, refit(3)


def whole_tensors(arch, quantization):
    """Hugging Face name -> (stored values, what they stand for), each tensor quantised whole."""
    hf = allocate(hf_layout(arch, "float32"))
    random_init(arch, hf_layout(arch, "float32"), hf, seed=7)
    return quantized(arch, quantization, hf)


def quantized(arch, quantization, hf):
    """Name of each of these Hugging Face tensors -> (stored values, what they stand for)."""
    found = {name: (tensor, tensor) for name, tensor in hf.items()}
    for name, grid in block_grids(arch, quantization).items():
        rows, columns = (
            torch.arange(size, dtype=torch.int32) // each for size, each in zip(grid.shape, grid.block, strict=True)
        )
        factors = fp8_quantize.multipliers(fp8_quantize.block_magnitudes(hf[name], (0, 0), grid.block))
        stored = fp8_quantize.quantize(hf[name], factors, rows, columns)
        meant = fp8_quantize.dequantize(stored, factors.reciprocal(), rows, columns, torch.empty(hf[name].shape))
        found[name] = (stored, meant)
    return found


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def holds_whole_tensors_cut(arch, grids, quantization):
    tensors = whole_tensors(arch, quantization)
    for grid in grids:
        engine, _ = refitted(arch, grid, quantization)
        assert_holds(engine, tensors, arch, grid)
        assert engine.policy_version == 3


def assert_holds(engine, tensors, arch, grid):
    own = native_layout(arch, grid.rollout_tp, grid.rollout_tp_rank(dist.get_rank()), "float32",
                        ep_size=grid.rollout_ep)  # fmt: skip
    num_quantized = 0
    for name, stored in own.items():
        for piece in stored.pieces:
            at, of = ([slice(*ends) for ends in region] for region in (piece.dst, piece.src))
            values, meant = (tensor[of] for tensor in tensors[piece.hf_name])
            assert torch.equal(bits(engine._weights[name][at]), bits(values)), (grid, name)
            if values.dtype == torch.float8_e4m3fn:
                num_quantized += 1
                assert torch.equal(dequantized(engine, name)[at], meant), (grid, name)
    assert num_quantized


def holds_weights_trained_in_fp8(arch, grid):
    policy = make_policy(arch, grid, megatron={"transformer": {"fp8": "e4m3", "fp8_recipe": "blockwise"}})
    before = full_weights(policy)
    train(policy, 1)
    weights = full_weights(policy)
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert any(not torch.equal(weight, before[name]) for name, weight in weights.items())
    group = rollout_group(dist.group.WORLD, grid.rollout_tp)
    engine = NativeEngine(spec_of(settings(arch, "fp8", grid), arch, tp_group=group, dtype=torch.float32))
    sources, grids = policy.named_tensors(), block_grids(arch, "fp8")
    WeightSync(policy.layout(), sources, engine, CheckpointEngineConfig(1), grids)(1)
    assert_holds(engine, quantized(arch, "fp8", weights), arch, grid)


def test_the_engine_gets_the_unquantized_weights_of_an_actor_that_trains_in_fp8():
    run_ranks(2, holds_weights_trained_in_fp8, TRAINED, ParallelLayout(2, tp=2, rollout_tp=2))


def dequantized(engine, name):
    """As the engine's products see it."""
    stored = engine._weights[name]
    parts = [*engine._model._linears.items()]
    for layer, experts in engine._model._experts.items():
        prefix = f"layers.{layer}."
        parts += [(prefix + key, linear) for key, linear in experts._shared.items()]
        for key, linears in (("experts_gate_up", experts._gate_up), ("experts_down", experts._down)):
            if name == prefix + key:
                return torch.cat([linear._scales.weight(linear._stored[0], None, torch.float32) for linear in linears])
    linear = dict(parts)[name]
    return linear._scales.weight(stored, None, torch.float32)


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_tensor"])
@pytest.mark.parametrize("model", GRIDS)
def test_every_layout_fills_the_engine_with_the_bytes_of_the_whole_tensors(model, quantization):
    run_ranks(4, holds_whole_tensors_cut, *GRIDS[model], quantization)


def costs(arch, grid):
    return [refitted(arch, grid, quantization, "bfloat16")[1] for quantization in (None, "fp8")]


def test_a_refit_in_fp8_sends_half_the_bytes_of_the_linear_layers():
    arch, grid = replace(DENSE, tie_word_embeddings=True), ParallelLayout(4, 2, 2)
    for plain, quantized in run_ranks(4, costs, arch, grid):
        saved = plain["refit/bytes_local"] + plain["refit/bytes_moved"]
        saved -= quantized["refit/bytes_local"] + quantized["refit/bytes_moved"]
        elements = sum(rows * columns for rows, columns in (grid.shape for grid in block_grids(arch, "fp8").values()))
        assert saved == 4 * elements  # a byte of each, on each of four engines
        assert quantized["refit/bytes_moved"] == quantized["refit/bytes_lower_bound"] < plain["refit/bytes_moved"]
        blocks = sum(grid.counts[0] * grid.counts[1] for grid in block_grids(arch, "fp8").values())
        assert quantized["refit/bytes_scales"] == 4 * 4 * blocks
        assert "refit/bytes_scales" not in plain


def refuses_nan(arch):
    return outcome(lambda: refitted(arch, ParallelLayout(2), "fp8", bad="layers.1.mlp.linear_fc2"))


def test_a_value_that_is_not_finite_is_named_on_every_rank():
    for message in run_ranks(2, refuses_nan, DENSE):
        assert "'model.layers.1.mlp.down_proj.weight' has values that are not finite" in message


def disagrees(arch, engine_has, refit_has):
    grid = ParallelLayout(1)
    layout = megatron_layout(arch, grid, 0, dtype="float32", te=False)
    engine = NativeEngine(spec_of(settings(arch, engine_has, grid), arch))
    return outcome(
        lambda: WeightSync(layout, allocate(layout), engine, CheckpointEngineConfig(1), block_grids(arch, refit_has))
    )


@pytest.mark.parametrize("engine_has, refit_has", [(None, "fp8"), ("fp8", None)])
def test_an_engine_that_stores_something_else_is_refused(engine_has, refit_has):
    (message,) = run_ranks(1, disagrees, DENSE, engine_has, refit_has)
    assert "the engine stores 'layers.0.qkv' as" in message and "rollout.quantization disagree" in message


def generates_what_the_meant_weights_give(arch, quantization):
    """Against an engine without quantisation that holds what the stored values stand for."""
    engine, _ = refitted(arch, ParallelLayout(1), quantization)
    plain = NativeEngine(spec_of(settings(arch, None, ParallelLayout(1)), arch))
    meant = {name: tensor for name, (_, tensor) in whole_tensors(arch, quantization).items()}
    plain.begin_update()
    plain.update_weights(
        [WeightSlice(name, full_region(tensor.shape), tensor) for name, tensor in filled(plain.layout(), meant).items()]
    )
    plain.finish_update(3)
    prompts, sampling = [Prompt(0, (1, 2, 3), ""), Prompt(1, (4, 5), "")], SamplingConfig(2, 6, seed=1)
    ours, theirs = (each.generate(prompts, sampling) for each in (engine, plain))
    assert [one.response_ids for one in ours] == [one.response_ids for one in theirs]
    assert [one.rollout_logprobs for one in ours] == [one.rollout_logprobs for one in theirs]
    exact, _ = refitted(arch, ParallelLayout(1), None)
    assert [one.rollout_logprobs for one in exact.generate(prompts, sampling)] != [one.rollout_logprobs for one in ours]


@pytest.mark.parametrize("model", GRIDS)
def test_samples_and_their_log_probabilities_are_those_of_the_weights_that_fp8_stands_for(model):
    run_ranks(1, generates_what_the_meant_weights_give, GRIDS[model][0], "fp8")


def bytes_held(arch, grid):
    engine, told = refitted(arch, grid, "fp8", "bfloat16")
    return sum(tensor.nbytes for tensor in engine._weights.values()), told


@pytest.mark.parametrize("model", GRIDS)
def test_the_plan_of_a_run_knows_the_engines_bytes_and_the_refits(model):
    arch, (_, grid, *_) = GRIDS[model]
    config = Config(model=ModelConfig(dtype="bfloat16"), rollout=settings(arch, "fp8", grid))
    plan = refit_plan(config, arch, grid)
    found = run_ranks(4, bytes_held, arch, grid)
    assert max(held for held, _ in found) == memory_plan(config).weight_bytes(config, arch, grid)
    for _, told in found:
        assert (plan.bytes_local, plan.bytes_moved) == (told["refit/bytes_local"], told["refit/bytes_moved"])


def test_scales_lie_beside_their_matrices():
    engine = NativeEngine(spec_of(settings(DENSE, "fp8", ParallelLayout(1)), DENSE))
    scaled = {name.removesuffix(SCALES) for name in engine.layout() if name.endswith(SCALES)}
    assert scaled == {f"layers.{i}.{name}" for i in range(2) for name in ("qkv", "o", "gate_up", "down")}
