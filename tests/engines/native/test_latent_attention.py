"""Latent attention in the native engine: against transformers, and a cache with one latent vector per token."""

from collections import defaultdict

import numpy as np
import pytest
import torch

from mrl.config.config import RolloutConfig, SpeculativeConfig
from mrl.engines._memory_plan import token_elements
from mrl.engines.base import SamplingConfig
from mrl.engines.native import latent_attention
from mrl.engines.native.decode_cost_model import Costs
from mrl.engines.native.engine import NativeEngine
from mrl.engines.native.fp8_scales import Scales
from mrl.engines.native.latent_attention import HeadProducts
from mrl.engines.native.model import Decoder
from mrl.engines.native.packed_linear import LinearAdapters
from mrl.errors import UserError
from mrl.models.base import MlaSpec
from mrl.models.hf_config import arch_from_folder
from mrl.resharding.dtypes import allocate
from mrl.resharding.native import native_layout
from mrl.types import Prompt
from tests.engines.native.streams import disturbed, exact, key_of
from tests.engines.native.test_converse import SAMPLING as TALKED
from tests.engines.native.test_converse import conversations
from tests.engines.native.test_engine import LENGTHS, score, tokens
from tests.engines.native.tiny import VOCAB, make_checkpoint, make_engine, make_prompts, reference, refit
from tests.engines.specs import spec_of
from tests.models.rope import both_spellings
from tests.ranks import run_ranks

LOGPROB_ATOL = 1e-5
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.2,
}  # fmt: skip
V2 = {
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-3,
}
V3 = {**V2, "model_type": "deepseek_v3", "q_lora_rank": 18, "n_group": 4, "topk_group": 2}
MODELS = {
    "v2": V2,
    "v2_yarn": {**V2, "q_lora_rank": 18, **both_spellings(YARN)},
    "v3": {**V3, "q_lora_rank": None},
    "v3_yarn": {**V3, **both_spellings(YARN)},
    "published_sizes": {**V3, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp(name), "qwen2", **MODELS[name])
        return made[name]

    return folder


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_log_probabilities_are_those_of_transformers(folders, name, eager):
    model, prompts = reference(folders(name)), make_prompts(LENGTHS)
    engine = make_engine(folders(name), enforce_eager=eager, max_num_batched_tokens=13)
    for rollout in engine.generate(prompts, SamplingConfig(n=1, max_tokens=40, greedy=True)):
        with torch.no_grad():
            ids = torch.tensor([[*rollout.prompt.prompt_ids, *rollout.response_ids]])
            expected = model(ids).logits[0, len(rollout.prompt.prompt_ids) - 1 : -1].argmax(-1)
        assert rollout.response_ids == expected.tolist()
        logprobs = torch.tensor(rollout.rollout_logprobs)
        torch.testing.assert_close(logprobs, score(model, rollout), atol=LOGPROB_ATOL, rtol=0)


SAMPLED = SamplingConfig(n=3, max_tokens=14, temperature=0.9, stop_token_ids=(5, 6, 7), seed=1)
PROMPTS = make_prompts(LENGTHS)


@pytest.fixture(scope="module")
def engine(folders):
    return make_engine(folders("v3_yarn"))


def assert_scored(folder, rollouts, temperature, atol=LOGPROB_ATOL):
    model = reference(folder)
    for rollout in rollouts:
        own = torch.tensor(rollout.sampled_mask or [True] * len(rollout.response_ids))
        expected = score(model, rollout, temperature)[own]
        torch.testing.assert_close(torch.tensor(rollout.rollout_logprobs)[own], expected, atol=atol, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 7, "enable_prefix_caching": False},
        {"max_num_seqs": 4, "enforce_eager": True},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_batch(folders, engine, settings):
    expected = tokens(engine.generate(PROMPTS, SAMPLED))
    found = make_engine(folders("v3_yarn"), **settings).generate(PROMPTS[::-1], SAMPLED)
    assert tokens(found) == expected
    assert_scored(folders("v3_yarn"), found, SAMPLED.temperature)


def _generate_on_ranks(folder, settings):
    made = make_engine(folder, tp_group=torch.distributed.group.WORLD, **settings)
    return [(r.response_ids, r.rollout_logprobs) for r in made.generate(PROMPTS, SAMPLED)], made._cache.row_bytes(16)


@pytest.mark.parametrize("ep", [1, 2])
def test_two_ranks_cut_the_heads_and_each_has_the_whole_cache(folders, engine, ep):
    ranks = run_ranks(2, _generate_on_ranks, folders("v3_yarn"), {"expert_parallel_size": ep})
    assert ranks[0] == ranks[1] and ranks[0][1] == engine._cache.row_bytes(16)
    for (ids, logprobs), rollout in zip(ranks[0][0], engine.generate(PROMPTS, SAMPLED), strict=True):
        assert ids == rollout.response_ids
        torch.testing.assert_close(
            torch.tensor(logprobs), torch.tensor(rollout.rollout_logprobs), atol=LOGPROB_ATOL, rtol=0
        )


def test_a_token_takes_one_latent_vector_and_one_rotated_key(engine):
    engine.generate(PROMPTS, SAMPLED)
    cache = engine._cache
    token_bytes = 3 * (20 + 8) * 4  # layers, latent vector and rotated key, fp32
    assert cache.row_bytes(32) == 32 * token_bytes
    assert cache.allocated_bytes == cache.num_rows * cache.row_len * token_bytes
    assert token_bytes == 4 * token_elements(engine.spec.arch, 2)  # which the plan takes for each rank
    for keys, values in zip(cache.keys, cache.values, strict=True):
        assert keys.data_ptr() == values.data_ptr()


@pytest.mark.parametrize("rows", [1, 3])
def test_conversations_score_as_transformers_scores_them(folders, rows):
    found, _ = conversations(folders("v2_yarn"), max_num_seqs=rows, max_num_batched_tokens=7)
    assert_scored(folders("v2_yarn"), found.values(), TALKED.temperature)


def test_samples_that_stop_and_go_on_have_the_same_tokens(engine):
    found, left = disturbed(engine, SAMPLED, prompts=PROMPTS)
    assert sum(map(len, left)) > 5
    assert tokens(found) == tokens(engine.generate(PROMPTS, SAMPLED))


@pytest.mark.compiler
def test_drafts_change_no_bit(tmp_path):
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 12}
    folder = make_checkpoint(tmp_path, "qwen2", **{**MODELS["v3_yarn"], **sizes})
    prompts = [Prompt(i, tuple(range(1 + i, 5 + 3 * i)), "") for i in range(3)]
    sampling = SamplingConfig(n=2, max_tokens=40, temperature=0.1, seed=2)
    speculative = SpeculativeConfig(method="ngram", prompt_lookup_min=1)
    plain, drafting = make_engine(folder), make_engine(folder, speculative=speculative)
    drafting._drafting._costs = defaultdict(lambda: Costs(np.ones(10_000), 0.0, 0.0))  # longer steps cost nothing
    expected = {key_of(one): exact(one) for one in plain.generate(prompts, sampling)}
    assert {key_of(one): exact(one) for one in drafting.generate(prompts, sampling)} == expected
    assert drafting.stats()["accepted_tokens"] > 0


def test_the_cost_of_a_step_is_measured(engine):
    """With the attention that a step has."""
    assert engine._model.own_work(3).shape == (3, VOCAB)
    engine._model.own_attention(3, 20)


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_update_gives_the_new_models_numbers(folders, tmp_path, dtype, eager):
    engine = make_engine(folders("v3_yarn"), dtype=dtype, enforce_eager=eager)
    first = engine.generate(PROMPTS, SAMPLED)
    other = make_checkpoint(tmp_path, "qwen2", **{**MODELS["v3_yarn"], "initializer_range": 0.2})
    engine.sleep()
    engine.release()
    refit(engine, other, arch_from_folder(other), version=1)
    engine.wake()
    found = engine.generate(PROMPTS, SAMPLED)
    assert tokens(found) != tokens(first)
    assert list(map(exact, found)) == list(
        map(exact, make_engine(other, dtype=dtype, enforce_eager=eager).generate(PROMPTS, SAMPLED))
    )
    refit(engine, folders("v3_yarn"), arch_from_folder(other), version=2)
    assert list(map(exact, engine.generate(PROMPTS, SAMPLED))) == list(map(exact, first))


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize("name", ["v2", "v3_yarn"])
def test_bfloat16_is_about_as_close_to_float32_as_in_transformers(folders, name, eager):
    rollouts = make_engine(folders(name), dtype=torch.bfloat16, enforce_eager=eager).generate(PROMPTS, SAMPLED)
    wide, narrow = (
        torch.cat([score(model, rollout, SAMPLED.temperature) for rollout in rollouts])
        for model in (reference(folders(name)), reference(folders(name)).bfloat16())
    )
    found = torch.tensor([logprob for rollout in rollouts for logprob in rollout.rollout_logprobs])
    assert (found - wide).square().mean().sqrt() < 2 * (narrow - wide).square().mean().sqrt()


# products of heads ----------------------------------------------------------------------------------------------------

MLA = MlaSpec(None, 20, 12, 8, 10)
HEADS = 3


@pytest.fixture(params=["packed", "plain"])
def kernels(request, monkeypatch):
    """Products of each head: by measured kernels, as on an x86 CPU, and as one batched product, as elsewhere."""
    if request.param == "plain":
        monkeypatch.setattr(latent_attention, "packs", lambda device: False)
    return request.param


def multiplied(products, q_PND):
    """[queries; values] of the same numbers, the values of the products of the queries."""
    absorbed = torch.empty(*q_PND.shape[:2], MLA.kv_lora_rank, dtype=q_PND.dtype)
    products.absorb(q_PND, absorbed)
    return absorbed, products.values(absorbed)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compiler)])
def test_products_are_those_of_each_heads_rows(kernels, compiled):
    weight = torch.randn(HEADS * (12 + 10), 20)
    products = HeadProducts(weight, MLA, torch.float32, compiled=compiled and kernels == "packed")
    q_PND = torch.randn(70, HEADS, 12 + 8)[..., :12]
    for scale in (1.0, 3.0):
        weight.mul_(scale)
        products.refresh()
        up, out = torch.split(weight.view(HEADS, 22, 20), [12, 10], 1)
        expected = torch.einsum("pnd,ndl->pnl", q_PND, up)
        found = multiplied(products, q_PND)
        torch.testing.assert_close(found[0], expected)
        torch.testing.assert_close(found[1], torch.einsum("pnl,nvl->pnv", expected, out).flatten(1))
        products.free_copies()
        assert products.reads == [weight]


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_a_token_depend_on_no_other(dtype):
    products = HeadProducts(torch.randn(HEADS * 22, 20).to(dtype), MLA, dtype, compiled=True)
    products.refresh()
    q_PND = torch.randn(70, HEADS, 12).to(dtype)
    whole = multiplied(products, q_PND)
    for num in (1, 2, 3, 8, 17, 33, 64):
        assert all(map(torch.equal, multiplied(products, q_PND[:num]), (each[:num] for each in whole)))


def test_weights_in_fp8_are_multiplied_as_their_scales_give_them(kernels):
    stored = torch.randn(HEADS * 22, 20).to(torch.float8_e4m3fn)
    rows, columns = torch.arange(HEADS * 22, dtype=torch.int32) // 16, torch.arange(20, dtype=torch.int32) // 16
    scales = Scales(torch.rand(5, 2) + 0.5, rows, columns)
    products = HeadProducts(stored, MLA, torch.float32, scales, compiled=False)
    assert (products.copy is None) == (kernels == "packed")
    plain = HeadProducts(scales.weight(stored, None, torch.float32), MLA, torch.float32, compiled=False)
    for each in (products, plain):
        each.refresh()
    q_PND = torch.randn(5, HEADS, 12)
    assert all(map(torch.equal, multiplied(products, q_PND), multiplied(plain, q_PND)))


# refusals -------------------------------------------------------------------------------------------------------------


def test_bits_of_the_actor_are_refused(folders):
    with pytest.raises(UserError, match=r"rollout\.true_on_policy=true.*deepseek_v3"):
        NativeEngine(spec_of(RolloutConfig(true_on_policy=True), arch_from_folder(folders("v3"))))


def test_adapters_of_the_latent_vectors_matrix_are_refused(folders):
    arch = arch_from_folder(folders("v3"))
    weights = allocate(native_layout(arch, 1, 0, "float32"))
    adapters = {"layers.0.kv_b": LinearAdapters([], 1.0)}
    with pytest.raises(UserError, match="kv_b_proj"):
        Decoder(arch, weights, tp_group=None, max_positions=8, adapters=lambda name, first, last: adapters.get(name))
