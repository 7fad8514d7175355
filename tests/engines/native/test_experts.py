"""Mixtures of experts in the native engine: against transformers, at every layout, and in any company."""

from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.nn.functional as F

from mrl.engines.base import SamplingConfig
from mrl.engines.native.experts import grouped, has_grouped_products, one_by_one
from mrl.engines.native.packed_linear import Linear
from mrl.engines.native.torch_ops import Operations
from tests.engines.native.test_engine import (
    LENGTHS,
    LOGPROB_ATOL,
    assert_greedy_tokens_are_those_of_transformers,
    tokens,
)
from tests.engines.native.tiny import make_checkpoint, make_engine, make_prompts, reference
from tests.ranks import run_ranks

GROUPED_ATOL = 1e-5
"""Sums of 16 to 24 products of unit size in another order, fp32."""

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
FAMILIES = {
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True, "head_dim": 32, "tie_word_embeddings": False},
    "qwen2_moe": {**EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 40},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "tie_word_embeddings": False},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 7,
        "tie_word_embeddings": False,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 20,
        "q_lora_rank": 22,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "tie_word_embeddings": False,
    },
}
UNORDERED = ("glm4_moe", "deepseek_v3")
"""Families of which transformers returns other logits than those by which it chooses, and experts in no order."""

RECORD = {"enable_rollout_routing_replay": True}
SAMPLED = SamplingConfig(n=3, max_tokens=12, temperature=0.9, stop_token_ids=(5, 6, 7, 8), seed=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            made[family] = make_checkpoint(
                tmp_path_factory.mktemp(family), "qwen2", model_type=family, **FAMILIES[family]
            )
        return made[family]

    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(folders, family):
    assert_greedy_tokens_are_those_of_transformers(folders(family))


@pytest.mark.parametrize("prompts", [LENGTHS, (3, 30)], ids=str)
def test_sinks_are_the_same_without_compiled_kernels(folders, prompts):
    sampling = SamplingConfig(n=2, max_tokens=20, temperature=0.9, seed=1)
    both = [make_engine(folders("gpt_oss"), enforce_eager=eager) for eager in (False, True)]
    found, expected = ([*each.generate(make_prompts(prompts), sampling)] for each in both)
    assert tokens(found) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        logprobs = [torch.tensor(each.rollout_logprobs) for each in (one, other)]
        torch.testing.assert_close(*logprobs, atol=LOGPROB_ATOL, rtol=0)


def _generate_on_ranks(folder, sampling, settings):
    engine = make_engine(folder, tp_group=torch.distributed.group.WORLD, **settings)
    rollouts = engine.generate(make_prompts(LENGTHS), sampling)
    return [(r.response_ids, r.rollout_logprobs, r.routed_experts.tolist()) for r in rollouts]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("ranks", "ep"), [(2, 1), (2, 2), (4, 2)], ids=["tp2", "ep2", "ep2 x tp2"])
def test_ranks_give_the_tokens_of_one(folders, family, ranks, ep):
    folder = folders(family)
    settings = {"max_num_seqs": 4, "expert_parallel_size": ep, **RECORD}
    sampling = SamplingConfig(n=2, max_tokens=12, temperature=0.9, top_p=0.95)
    found = run_ranks(ranks, _generate_on_ranks, folder, sampling, settings)
    assert all(result == found[0] for result in found)
    alone = make_engine(folder, **RECORD).generate(make_prompts(LENGTHS), sampling)
    for (ids, logprobs, record), rollout in zip(found[0], alone, strict=True):
        assert ids == rollout.response_ids
        assert record == rollout.routed_experts.tolist()
        torch.testing.assert_close(
            torch.tensor(logprobs), torch.tensor(rollout.rollout_logprobs), atol=LOGPROB_ATOL, rtol=0
        )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [{"max_num_seqs": 1}, {"max_num_seqs": 3, "max_num_batched_tokens": 7, "enable_prefix_caching": False}],
    ids=str,
)
def test_tokens_do_not_depend_on_the_batch(folders, family, settings):
    sampling = SamplingConfig(n=2, max_tokens=20, temperature=0.9, stop_token_ids=(5, 6, 7), seed=1)
    prompts = make_prompts(LENGTHS)
    expected = tokens(make_engine(folders(family)).generate(prompts, sampling))
    engine = make_engine(folders(family), **settings)
    assert tokens(engine.generate(prompts, sampling)) == expected
    assert tokens(engine.generate(prompts[::-1], sampling)) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_a_token_depend_on_no_other(folders, family, dtype):
    engine = make_engine(folders(family), dtype=dtype)
    (experts, *_), x_PH = (
        engine._model._experts.values(),
        torch.randn(70, 48, generator=torch.Generator().manual_seed(0)),
    )
    x_PH = x_PH.to(engine._model.dtype)
    whole, _ = experts(x_PH)
    for num in (1, 2, 3, 8, 17, 31, 33, 64):
        assert torch.equal(experts(x_PH[:num])[0], whole[:num])


@pytest.mark.parametrize("held", [range(8), range(2), range(2, 6), range(6, 8)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_grouped_products_equal_one_for_each_expert(held, num_tokens):
    generator = torch.Generator().manual_seed(0)
    x_PH = torch.randn(num_tokens, 16, generator=generator)
    chosen_PK = torch.rand(num_tokens, 8, generator=generator).topk(3).indices
    gate_up = torch.randn(len(held), 48, 16, generator=generator)
    down = torch.randn(len(held), 16, 24, generator=generator)
    linears = [[Linear(weight, None, torch.float32) for weight in stack] for stack in (gate_up, down)]
    for linear in (*linears[0], *linears[1]):
        linear.refresh()
    plain = torch.zeros(num_tokens, 3, 16)
    for token in range(num_tokens):
        for place, expert in enumerate(chosen_PK[token].tolist()):
            if expert in held:
                gate, up = (gate_up[expert - held.start] @ x_PH[token]).chunk(2)
                plain[token, place] = down[expert - held.start] @ (torch.nn.functional.silu(gate) * up)
    scale = plain.abs().max().clamp(min=1)
    alone = one_by_one(x_PH, chosen_PK, held, *linears, Operations().gate)
    for found in (alone, grouped(x_PH, chosen_PK, held, gate_up, down)):
        assert (found.view_as(plain) - plain).abs().max() <= GROUPED_ATOL * scale


def chosen_by(model, rollout):
    """Experts that transformers chooses for all but the last token of a rollout, [tokens, layers, top_k]."""
    ids = torch.tensor([[*rollout.prompt.prompt_ids, *rollout.response_ids[:-1]]])
    if model.config.model_type in UNORDERED:
        found = []
        gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        hooks = [gate.register_forward_hook(lambda gate, given, out: found.append(out[2])) for gate in gates]
        with torch.no_grad():
            model(ids)
        for hook in hooks:
            hook.remove()
        return torch.stack(found, 1)
    with torch.no_grad():
        logits = model(ids, output_router_logits=True).router_logits
    top_k = model.config.num_experts_per_tok
    return torch.stack([layer.softmax(-1).topk(top_k).indices for layer in logits], 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_seqs": 2, "max_num_batched_tokens": 7}, {"max_num_seqs": 4, "enable_prefix_caching": False}],
    ids=str,
)
def test_the_record_is_what_transformers_routes(folders, family, settings):
    model = reference(folders(family))
    rollouts = make_engine(folders(family), **RECORD, **settings).generate(make_prompts(LENGTHS), SAMPLED)
    plain = make_engine(folders(family), **settings).generate(make_prompts(LENGTHS), SAMPLED)
    assert len({len(rollout.response_ids) for rollout in rollouts}) > 3  # rows end at different steps, and move
    for rollout, bare in zip(rollouts, plain, strict=True):
        record = rollout.routed_experts
        assert record.dtype == torch.int8 and record.size(0) == rollout.num_tokens
        found, expected = record[:-1].long(), chosen_by(model, rollout)
        if family in UNORDERED:
            found, expected = found.sort(-1).values, expected.sort(-1).values
        assert torch.equal(found, expected)
        assert record[-1].eq(-1).all()
        assert bare.routed_experts is None
        assert (bare.response_ids, bare.rollout_logprobs) == (rollout.response_ids, rollout.rollout_logprobs)


def test_the_record_counts_against_the_budget(folders):
    engine = make_engine(folders("qwen3_moe"), **RECORD)
    row_bytes = engine._cache.row_bytes(32) + 32 * 3 * 3  # slots; tokens x layers x experts of a token, int8
    sampling = SamplingConfig(n=4, max_tokens=12)
    engine._cache.budget_bytes = 3 * row_bytes - 1
    engine.generate(make_prompts([20]), sampling)
    assert engine.stats()["max_running"] == 2


def test_a_dense_model_keeps_no_record(tmp_path):
    rollouts = make_engine(make_checkpoint(tmp_path), **RECORD).generate(make_prompts([4]), SAMPLED)
    assert rollouts[0].routed_experts is None


def test_weights_and_work_to_come_are_not_free_for_the_cache(folders, monkeypatch):
    free = 1 << 30
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    engine = make_engine(folders("qwen3_moe"), gpu_memory_utilization=0.5, max_num_batched_tokens=100)
    stored = sum(weight.nbytes for weight in engine._weights.values())
    matrices = sum(weight.nbytes for name, weight in engine._weights.items() if weight.dim() == 2 and name != "embed")
    copies = matrices if engine._model._linears["lm_head"].copy_bytes else 0  # a processor may multiply as stored
    work = 100 * 3 * (4 * 48 + 5 * 24) * 4
    assert engine._cache.budget_bytes == (free - stored - copies - work) // 2


@pytest.mark.parametrize(
    ("capability", "has"), [((8, 0), False), ((9, 0), True), ((10, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_grouped_products_are_for_the_devices_that_have_a_kernel(capability, has):
    assert has_grouped_products(capability) is has


def test_a_torch_without_grouped_products_computes_one_expert_after_the_other(monkeypatch):
    monkeypatch.delattr(F, "grouped_mm")
    assert not has_grouped_products((9, 0))
