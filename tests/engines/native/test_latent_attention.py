"""Latent attention in the native engine: against transformers, and a cache with one latent vector per token."""

import pytest
import torch

from mrl.engines.base import SamplingConfig
from tests.engines.native.test_engine import LENGTHS, score
from tests.engines.native.tiny import make_checkpoint, make_engine, make_prompts, reference
from tests.models.rope import both_spellings

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
