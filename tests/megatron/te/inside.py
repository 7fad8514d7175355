"""Megatron's TE spec against its local spec, and what a checkpoint of it holds; runs where the hooks are in place.

pytest -p tests.megatron.te.active tests/megatron/te/inside.py
"""

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mrl.checkpoint.formats.checkpoint_metadata import COMMON_STATE, METADATA, read_metadata
from mrl.config.megatron_fields.defaults import EXPERT_FUSIONS, FUSIONS
from mrl.megatron import checkpoint
from mrl.models import transformer_engine
from mrl.models.transformer_engine import lacks_attention
from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import (
    ARCHS,
    CONSTANT,
    MIXTURES,
    SHALLOW_MIXTURE,
    config_for,
    full_gradients,
    full_weights,
    make_batch,
    make_policy,
    own_part,
    scores,
    train,
)
from tests.megatron.te import cuda
from tests.megatron.trainings import assert_same
from tests.ranks import run_ranks

SCORE = 1e-5  # nats; fp32 sums in another order, measured below 3e-6
GRADIENT = 1e-5  # of the largest element of a tensor; fp32 sums over all tokens in another order
FLOOR = 1e-6  # of the largest element of all: some gradients are 0 but for rounding
BF16_SCORE = 0.1  # nats; eight bits through all layers, in another order of rounding: measured 0.034
CASES = {
    "tp2": (ARCHS["qwen3"], ParallelLayout(2, tp=2), {"sequence_parallel": False}),
    "tp2_sp": (ARCHS["qwen2"], ParallelLayout(2, tp=2), {}),
    "pp2": (ARCHS["llama"], ParallelLayout(2, pp=2), {}),
    "cp2": (ARCHS["qwen3"], ParallelLayout(2, cp=2), {}),
    "ep2": (MIXTURES["qwen3_moe"], ParallelLayout(2, ep=2), {}),
    "latent_tp2_ep2": (MIXTURES["deepseek_v3"], ParallelLayout(2, tp=2, ep=2, etp=1), {}),
    "latent_cp2": (MIXTURES["deepseek_v2"], ParallelLayout(2, cp=2), {}),
    "sinks_tp2_ep2": (MIXTURES["gpt_oss"], ParallelLayout(2, tp=2, ep=2, etp=1), {}),
    "norms_tp2": (ARCHS["gemma3_text"], ParallelLayout(2, tp=2), {}),
    "norms_cp2": (ARCHS["gemma3_text"], ParallelLayout(2, cp=2), {}),
    "etp2_shared_expert": (SHALLOW_MIXTURE, ParallelLayout(2, tp=2), {}),
}


def loss(logprobs_R, entropy_R, microbatch):
    return (microbatch.weights_R * (0.3 * entropy_R - logprobs_R)).sum(), {}


def measured(policy):
    """Scores of a ragged batch, in several packed microbatches, and the gradient of a loss over it."""
    batch = make_batch()
    scored = scores(policy, batch)
    policy.start_optimizer(CONSTANT)
    for wrapped in policy._data_parallel.chunks:
        wrapped.zero_grad_buffer()
    microbatches = policy._forward_backward.microbatches(own_part(batch, policy), policy._sampling_distribution)
    assert len(microbatches) > 1
    policy._forward_backward.run(microbatches, loss, backward=True)
    return scored, full_gradients(policy)


def both(arch, grid, **options):
    """Names of modules, scores and gradients: with TransformerEngine's layers, then with the local ones."""
    found = []
    for impl in ("te", "local"):
        actor = {"transformer_impl": impl, "use_distributed_optimizer": False, "max_tokens_per_microbatch": 24}
        policy = make_policy(arch, grid, actor=actor, **options)
        names = {type(module).__name__ for chunk in policy.chunks for module in chunk.modules()}
        found.append((names, *measured(policy)))
    return found


@pytest.mark.parametrize("case", CASES)
def test_scores_and_gradients_are_those_of_the_local_spec(case):
    arch, grid, layout = CASES[case]
    for (names, scored, gradients), (others, local, expected) in run_ranks(2, both, arch, grid, parallel=layout):
        own = "CoreAttention" if arch.attention_sinks else "RotatingAttention"
        assert {"TERowParallelLinear", own if lacks_attention(arch) else "TESharedAttention"} <= names
        assert ("TEGroupedMLP" in names) == (arch.moe is not None)
        assert not any(name.startswith("TE") for name in others)
        torch.testing.assert_close(scored, local, rtol=0, atol=SCORE)
        largest = max(float(value.abs().max()) for value in expected.values())
        assert gradients.keys() == expected.keys()
        for name, value in expected.items():
            allowed = GRADIENT * float(value.abs().max()) + FLOOR * largest
            assert float((gradients[name] - value).abs().max()) <= allowed, name


def test_bf16_scores_are_near_those_of_the_local_spec():
    for (_, scored, _), (_, local, _) in run_ranks(2, both, ARCHS["qwen3"], ParallelLayout(2, cp=2), dtype="bfloat16"):
        torch.testing.assert_close(scored, local, rtol=0, atol=BF16_SCORE)


OFF = {
    "transformer": dict.fromkeys((*FUSIONS, *EXPERT_FUSIONS), False),
    "ddp": {"overlap_param_gather": False},
}
"""What is on by itself, turned off."""


def trained(arch, grid):
    """Metrics and weights of three updates with what is on by itself, then without; and whether it was on."""
    found = []
    for megatron in ({}, OFF):
        actor = {"transformer_impl": "te", "overlap_grad_reduce": None if not megatron else False}
        policy = make_policy(arch, grid, actor=actor, megatron=megatron)
        metrics, weights = train(policy, 3), full_weights(policy)
        chunk, settings = policy.chunks[0], policy._data_parallel.chunks[0].ddp_config
        layer, above = chunk.decoder.layers[0], chunk.output_layer
        on = {
            *(name for name in (*FUSIONS, *EXPERT_FUSIONS) if getattr(layer.config, name)),
            *(name for name in ("overlap_grad_reduce", "overlap_param_gather") if getattr(settings, name)),
        }
        assert not above.gradient_accumulation_fusion  # Apex's
        assert layer.self_attention.linear_qkv.fuse_wgrad_accumulation == (not megatron)
        found.append((metrics, weights, on))
    return found


@pytest.mark.parametrize("name", ["qwen2_untied", "qwen3_moe"])
def test_what_is_on_by_itself_changes_no_number(name):
    arch = {**ARCHS, **MIXTURES}[name]
    experts = set(EXPERT_FUSIONS) if arch.moe is not None else set()
    (on, off), _ = run_ranks(2, trained, arch, ParallelLayout(2, ep=2 if arch.moe is not None else 1))
    assert on[2] == {*FUSIONS, *experts, "overlap_grad_reduce", "overlap_param_gather"} and off[2] == set()
    assert_same(on[:2], off[:2])


def chosen(once, **parallel):
    """By compute capability: which attention TransformerEngine would take, and whether for shared tokens."""
    from transformer_engine.pytorch.utils import _get_device_compute_capability as known

    config = config_for(ParallelLayout(1), dtype="bfloat16", parallel=parallel, actor={"use_prefix_grouper": once})
    own, found = cuda.CAPABILITY, {}
    for capability in ((9, 0), (8, 0), own):
        cuda.CAPABILITY = capability
        known.cache_clear()
        transformer_engine._attentions.cache_clear()
        arch = ARCHS["qwen3"]
        found[capability] = (
            transformer_engine.attention(config, arch),
            transformer_engine.supports_prefix_sharing(config, arch),
        )
    return found


def test_where_cudnn_takes_no_packed_sequences_there_is_no_fit_attention():
    """flash-attn is not installed here."""
    assert run_ranks(1, chosen, False) == [{(9, 0): ("fused", False), (8, 0): ("unfused", False)}]
    assert run_ranks(1, chosen, True) == [{(9, 0): ("fused", True), (8, 0): ("unfused", True)}]
    assert run_ranks(1, chosen, False, context_parallel_size=2) == [{(9, 0): ("fused", False), (8, 0): (None, False)}]
    assert run_ranks(1, chosen, True, context_parallel_size=2) == [{(9, 0): ("fused", True), (8, 0): ("unfused", True)}]


def asked_exchange(way):
    """Returns the exchange of keys about which TransformerEngine is asked."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    asked, own = [], utils.get_attention_backend
    transformer_engine._attentions.cache_clear()
    try:
        utils.get_attention_backend = lambda params: asked.append(params) or own(params)
        megatron = {} if way is None else {"transformer": {"cp_comm_type": way}}
        config = config_for(
            ParallelLayout(1), dtype="bfloat16", parallel={"context_parallel_size": 2}, megatron=megatron
        )
        assert transformer_engine.attention(config, ARCHS["qwen3"])
    finally:
        utils.get_attention_backend = own
        transformer_engine._attentions.cache_clear()
    return [params.cp_comm_type for params in asked if params.context_parallel]


@pytest.mark.parametrize("way", [None, "p2p", "a2a"])
def test_attention_is_chosen_for_the_configured_exchange_of_keys(way):
    assert run_ranks(1, asked_exchange, way) == [[way or "p2p"]]


def without_bottom_right():
    """What is said and done where cuDNN is older than 9.6, which has no such mask for packed sequences."""
    from tests.megatron.te.extension import attention as kernels

    takes, kernels._takes_bottom_right = kernels._takes_bottom_right, lambda *lengths: False
    transformer_engine._attentions.cache_clear()
    try:
        policy = make_policy(ARCHS["qwen3"], ParallelLayout(1))
        config = config_for(ParallelLayout(1))
        told = transformer_engine.described(config, ARCHS["qwen3"], "cpu")
        batch = make_batch()
        rows = sum(
            micro.tokens.numel()
            for micro in policy._forward_backward.microbatches(batch, policy._sampling_distribution)
        )
        return told, rows, int(batch.seq_lens_B.sum()) - batch.num_sequences
    finally:
        kernels._takes_bottom_right = takes
        transformer_engine._attentions.cache_clear()


def test_where_only_slow_attention_takes_shared_tokens_each_sequence_is_computed_alone():
    ((told, rows, inputs),) = run_ranks(1, without_bottom_right)
    assert "with its fused attention; it does not support a shared" in told
    assert rows == inputs


def saved_and_loaded(folder):
    policy = make_policy(SHALLOW_MIXTURE, ParallelLayout(2, ep=2))
    policy.start_optimizer(CONSTANT)
    checkpoint.save(folder / "first", policy)  # as every run does, before any step
    train(policy, 1)
    checkpoint.save(folder / "second", policy)
    adams = {type(part.optimizer).__module__ for part in policy.optimizer.chained_optimizers}
    weights = full_weights(policy)
    again = make_policy(SHALLOW_MIXTURE, ParallelLayout(2, ep=2), seed=None, groups=policy._groups)
    again.start_optimizer(CONSTANT)
    checkpoint.load(folder / "second", again)
    found = full_weights(again)
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert train(again, 1, first=1) == train(policy, 1, first=1)
    return adams


def test_a_checkpoint_of_grouped_experts_and_a_fused_adam_holds_tensors_only(tmp_path):
    for adams in run_ranks(2, saved_and_loaded, tmp_path):
        assert adams == {"transformer_engine.pytorch.optimizers.fused_adam"}
    for name in ("first", "second"):
        stored = read_metadata(tmp_path / name / METADATA).state_dict_metadata
        objects = {key for key, value in stored.items() if not isinstance(value, TensorStorageMetadata)}
        assert objects <= {COMMON_STATE}
