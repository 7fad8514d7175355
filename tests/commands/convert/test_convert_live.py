"""Converted weights in live models: Megatron's at another layout than the one that was written, and transformers'."""

from copy import deepcopy

import pytest
import torch
import transformers

from mrl.checkpoint.formats.hf import HfSource, HfTarget
from mrl.checkpoint.formats.megatron import MegatronSource, MegatronTarget
from mrl.commands.convert.convert import convert
from mrl.megatron import checkpoint
from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import ARCHS, MIXTURES, VOCAB, make_batch, make_policy, scores, train
from tests.megatron.actors import LINEAR as DENSE_LINEAR
from tests.megatron.test_model import PARITY, SIZES, TEMPERATURE, by_transformers
from tests.ranks import run_ranks

MODELS = {
    "qwen2": {"model_type": "qwen2", **SIZES, "tie_word_embeddings": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **SIZES,
        "head_dim": 20,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        **{key: value for key, value in SIZES.items() if not key.startswith("rope_")},
        "head_dim": 20,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
        "pad_token_id": None,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **SIZES,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "tie_word_embeddings": False,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **{key: value for key, value in SIZES.items() if not key.startswith("rope_")},
        "num_key_value_heads": SIZES["num_attention_heads"],
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "head_dim": 8,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}
LINEAR = {
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
MODELS["qwen3_next"] = {
    "model_type": "qwen3_next",
    **SIZES,
    **LINEAR,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}
MODELS["qwen3_5_text"] = {"model_type": "qwen3_5_text", **SIZES, **LINEAR}
WRITTEN = {
    "qwen2": ParallelLayout(4, tp=4),
    "qwen3_moe": ParallelLayout(4, pp=2, ep=2),
    "gemma3_text": ParallelLayout(4, tp=2, pp=2),
    "gpt_oss": ParallelLayout(4, pp=2, ep=2),
    "deepseek_v3": ParallelLayout(4, tp=2, pp=2),
    "qwen3_next": ParallelLayout(4, pp=2, ep=2),
    "qwen3_5_text": ParallelLayout(2, tp=2),
}
LIVE = {
    "qwen2": ParallelLayout(2, pp=2),
    "qwen3_moe": ParallelLayout(4, tp=2, ep=2, etp=1),
    "gemma3_text": ParallelLayout(2, pp=2),
    "gpt_oss": ParallelLayout(4, tp=2, ep=2, etp=1),
    "deepseek_v3": ParallelLayout(2, ep=2),
    "qwen3_next": ParallelLayout(4, tp=2, ep=2, etp=1),
    "qwen3_5_text": ParallelLayout(2, pp=2),
}
OF_LINEAR = {"qwen3_next": arch_from_preset("qwen3_next_tiny", {}, VOCAB), "qwen3_5_text": DENSE_LINEAR}
OPTIONS = {"rollout": {"temperature": TEMPERATURE}, "actor": {"max_tokens_per_microbatch": 150}}


def scored(folder, arch, grid, batch):
    policy = make_policy(arch, grid, seed=None, **OPTIONS)
    checkpoint.load(folder, policy)
    return scores(policy, batch)


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_checkpoint_scores_as_transformers_do_at_another_layout(name, tmp_path):
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**deepcopy(MODELS[name]))
    ).eval()
    model.save_pretrained(tmp_path / "hf")
    batch = make_batch(6, seed=7, longest=40)
    with HfSource(tmp_path / "hf") as source:
        arch = source.arch
        convert(source, MegatronTarget(arch, WRITTEN[name], "float32"), tmp_path / "megatron")
    expected = by_transformers(model, batch)
    for found in run_ranks(LIVE[name].world_size, scored, tmp_path / "megatron", arch, LIVE[name], batch):
        torch.testing.assert_close(found, expected, rtol=0, atol=PARITY)


def trained(folder, arch, grid, batch):
    policy = make_policy(arch, grid, **OPTIONS)
    train(policy, 1)
    checkpoint.save(folder, policy)
    return scores(policy, batch)


@pytest.mark.parametrize("name", MODELS)
def test_what_training_saved_scores_the_same_in_transformers(name, tmp_path):
    arch, batch = {**ARCHS, **MIXTURES, **OF_LINEAR}[name], make_batch(6, seed=8, longest=40)
    found = run_ranks(LIVE[name].world_size, trained, tmp_path / "actor", arch, LIVE[name], batch)[0]
    with MegatronSource(tmp_path / "actor") as source:
        convert(source, HfTarget(source.arch, "float32"), tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    torch.testing.assert_close(found, by_transformers(model, batch), rtol=0, atol=PARITY)
