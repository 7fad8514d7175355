"""What the backward pass is said to keep is what autograd keeps, counted in real actors."""

import math
from dataclasses import replace

import pytest
import torch

from mrl.algorithms.base import build
from mrl.commands.plan.activations import ActorShape
from mrl.config.config import ActorConfig, AlgorithmConfig, LoraConfig, RolloutConfig, TrainConfig
from mrl.megatron import model
from mrl.models.base import LinearAttentionSpec
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.random_init import init_adapters
from mrl.types import RolloutBatch
from tests.megatron.actors import ARCHS, CONSTANT, MIXTURES, config_for, make_policy
from tests.ranks import run_ranks

PROMPTS, SAMPLES, PROMPT, RESPONSE = 16, 4, 40, 24
RELATIVE = 0.02  # samples that begin alike by chance, uneven experts
VOCAB = 101
LINEAR = 0.2  # the size of a chunk depends on the lengths of the sequences
NO_ADAPTERS = LoraConfig()


def batch() -> RolloutBatch:
    """Groups of samples of one prompt, all lengths at their limit."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(PROMPTS):
        prompt = torch.randint(0, VOCAB, (PROMPT,), generator=generator)
        for _ in range(SAMPLES):
            rows.append(torch.cat([prompt, torch.randint(0, VOCAB, (RESPONSE,), generator=generator)]))
    num = PROMPTS * SAMPLES
    total = num * RESPONSE
    return RolloutBatch(
        tokens_P=torch.cat(rows),
        prompt_lens_B=torch.full((num,), PROMPT),
        response_lens_B=torch.full((num,), RESPONSE),
        response_mask_R=torch.ones(total, dtype=torch.bool),
        rollout_logprobs_R=torch.full((total,), -4.0),
        group_id_B=torch.arange(num) // SAMPLES,
        rewards_B=torch.zeros(num),
        advantages_R=torch.randn(total, generator=generator),
        weights_R=torch.full((total,), 1 / total),
        metric_weights_R=torch.full((total,), 1 / total),
    )


def saved_bytes(arch, grid, options, compiled) -> int:
    """Storages, parameters aside, that autograd keeps of one forward pass of the whole batch."""
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(model, "compiles", lambda dtype: False)
        return saved_of_a_pass(arch, grid, options, patch)


def saved_of_a_pass(arch, grid, options, patch) -> int:
    policy = make_policy(arch, grid, **options)
    if policy.adapters is not None:
        init_adapters(arch, options["actor"]["lora"], policy.adapters.layout(), policy.trained_tensors(), 0)
    policy.start_optimizer(CONSTANT)
    parameters = {tensor.untyped_storage().data_ptr() for chunk in policy.chunks for tensor in chunk.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}
    counted = [0]
    algorithm = build(AlgorithmConfig(name="grpo"), RolloutConfig(n=SAMPLES))

    microbatches = policy._forward_backward.microbatches(batch(), policy._sampling_distribution)

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # held, so that no address comes twice
        return tensor

    def kept_turns(chunk, angles, factor, turns=model.ScoringModel._cos_and_sin):
        return tuple(keep(tensor) for tensor in turns(chunk, angles, factor))

    def loss(logprobs_R, entropy_R, micro):
        value = algorithm.loss(logprobs_R, entropy_R, micro)
        counted[0] = sum(storage.nbytes() for storage in kept.values())  # the backward recomputes behind this
        return value

    for micro in microbatches:
        packed = micro.packed
        if packed.prefix_mask is not None:
            own = [packed.prefix_mask.row_P]
        else:
            of_keys = (packed.keys.order_S, packed.keys.starts_D, packed.keys.row_S)
            masks = [group.unseen for group in packed.groups if group.unseen is not None]
            own = [packed.query_slots, packed.row_to_slot, *of_keys, *masks]
        for tensor in (micro.tokens, micro.positions, *own):
            keep(tensor)
    patch.setattr(model.ScoringModel, "_cos_and_sin", kept_turns)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy._forward_backward.run(microbatches, loss, backward=True)
    return counted[0]


@pytest.mark.compiler
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3_text", "qwen3_moe", "qwen2_moe"])
def test_saved_tensors_are_counted(name, recompute):
    check({**ARCHS, **MIXTURES}[name], ParallelLayout(1), recompute, "float32")


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("name", "grid", "dtype"),
    [
        ("qwen3", ParallelLayout(1), "bfloat16"),
        ("qwen3", ParallelLayout(2, tp=2), "float32"),
        ("qwen3_moe", ParallelLayout(2, tp=2, ep=2, etp=1), "float32"),
        ("qwen3_moe", ParallelLayout(2, tp=2), "float32"),
    ],
)
def test_saved_tensors_are_counted_when_ranks_share_them(name, grid, dtype):
    check({**ARCHS, **MIXTURES}[name], grid, "none", dtype)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("qwen2", {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}),
        ("qwen3", {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]}),
        ("qwen3_moe", {"recompute_granularity": "selective", "recompute_modules": ["moe", "layernorm"]}),
        ("qwen3", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}),
        ("qwen3", {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}),
    ],
    ids=str,
)
def test_what_megatrons_own_recompute_leaves_is_counted(name, fields):
    check({**ARCHS, **MIXTURES}[name], ParallelLayout(1), "none", "float32", megatron={"transformer": fields})


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen2_moe"])
def test_saved_tensors_are_counted_where_nothing_is_compiled(name, recompute):
    check({**ARCHS, **MIXTURES}[name], ParallelLayout(1), recompute, "float32", compiled=False)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2"])
def test_saved_tensors_of_latent_attention_are_counted(name, recompute):
    check(MIXTURES[name], ParallelLayout(1), recompute, "float32")


@pytest.mark.parametrize(("name", "dtype"), [("deepseek_v3", "float32"), ("deepseek_v2", "bfloat16")])
def test_saved_tensors_of_latent_attention_are_counted_when_ranks_share_them(name, dtype):
    check(MIXTURES[name], ParallelLayout(2, tp=2, ep=2, etp=1), "none", dtype)


@pytest.mark.compiler
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_saved_tensors_are_counted_with_adapters(name, recompute, compiled):
    check(
        {**ARCHS, **MIXTURES}[name], ParallelLayout(1), recompute, "float32", compiled=compiled, lora=LoraConfig(rank=8)
    )


def check(arch, grid, recompute, dtype, megatron=None, *, compiled=True, lora=NO_ADAPTERS, relative=RELATIVE):
    arch = replace(arch, num_layers=2)
    actor = {"recompute": recompute, "max_tokens_per_microbatch": 1 << 16, "lora": lora}
    options = {"actor": actor, "dtype": dtype, "megatron": megatron}
    config = replace(
        config_for(grid, **options),
        train=TrainConfig(batch_size=PROMPTS),
        rollout=RolloutConfig(n=SAMPLES, prompt_length=PROMPT, response_length=RESPONSE),
        actor=ActorConfig(**actor),
    )
    shape = ActorShape(config, arch, grid, te=False, compiled=compiled, on_host=True)
    expected = shape.activations(0).saved
    for found in run_ranks(grid.world_size, saved_bytes, arch, grid, options, compiled):
        assert math.isclose(expected, found, rel_tol=relative), (expected, found, expected / found)


@pytest.mark.parametrize("layers", [(0,), (0, 1)], ids=str)
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_what_linear_attention_saves_is_estimated(layers, recompute):
    linear = LinearAttentionSpec(layers, 2, 4, 32, 32, 4)
    arch = replace(ARCHS["qwen3"], family="qwen3_5_text", output_gate=True, linear_attention=linear)
    check(arch, ParallelLayout(1), recompute, "float32", relative=LINEAR)
