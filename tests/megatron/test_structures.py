"""Positions, windows and routers: log-probabilities and gradients of the actor are transformers'."""

from copy import deepcopy
from functools import cache

import pytest
import torch

from mrl.algorithms.base import build
from mrl.checkpoint.formats.hf import load_from_hf
from mrl.config.config import AlgorithmConfig, RolloutConfig
from mrl.megatron import model as model_of_megatron
from mrl.models._positions import for_run
from mrl.models.hf_config import arch_from_folder
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.hf_names import locate_tensors
from tests.megatron.actors import CONSTANT, VOCAB, full_gradients, make_batch, make_policy, own_part, scores
from tests.megatron.autoregressive import scores_and_gradients
from tests.models.rope import variants, with_one_list
from tests.ranks import run_ranks

PARITY = 1e-5
GRADIENT = 1e-5  # of the largest gradient of a tensor
LONGEST = 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 4}
STRUCTURES = {
    "windows": ("mistral", {"sliding_window": 9}),
    "some_windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "windows_of_experts": ("mixtral", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "dense_layers": ("qwen3_moe", {**EXPERTS, "num_experts": 4, "mlp_only_layers": [0, 2], "norm_topk_prob": True}),
    "biased_router": (
        "glm4_moe",
        {
            **EXPERTS,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "unscaled_router": ("glm4_moe", {**EXPERTS, "n_routed_experts": 4, "norm_topk_prob": False}),
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "rms_norm_eps": 1e-4,
    "head_dim": 8,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.8,
    "mscale_all_dim": 0.6,
}
STRUCTURES["latent"] = (
    "deepseek_v3",
    {
        **EXPERTS,
        **LATENT,
        "q_lora_rank": 20,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": YARN,
    },
)
STRUCTURES["latent_keys"] = (
    "deepseek_v2",
    {**EXPERTS, **LATENT, "q_lora_rank": None, "n_routed_experts": 4, "routed_scaling_factor": 1.5},
)
VARIANTS = {**variants(head_dim=16, original=16), **STRUCTURES}
LAYOUTS = {
    "single": (ParallelLayout(1), {}),
    "tp2_pp2": (ParallelLayout(4, tp=2, pp=2), {}),
    "cp2": (ParallelLayout(2, cp=2), {}),
    "uncompiled": (ParallelLayout(1), {}),
    "exact_tp2": (ParallelLayout(2, tp=2), {"true_on_policy": True}),
    "ep2_pp2": (ParallelLayout(4, pp=2, ep=2), {}),
    "tp2_ep2": (ParallelLayout(2, tp=2, ep=2, etp=1), {}),
}
SCALED = ["yarn_all", "phi4_mini"]
"""Variants for further layouts: with an attention factor, of a whole and of a partly rotated head."""
GROUPED = {"tp2_pp2", "cp2", "ep2_pp2", "tp2_ep2"}
"""Layouts in which the sequences of a prompt share its tokens; elsewhere they are computed alone."""


def batch_of():
    """Sequences below and above the original length; groups share their prompt."""
    batch = make_batch(6, seed=2, longest=LONGEST // 2)
    assert batch.seq_lens_B.min() <= 16 < batch.seq_lens_B.max()
    return batch


@cache
def model_of(name, root):
    """Folder, log-probabilities and gradients by transformers, with one list of longrope for all sequences."""
    import transformers

    family, rope = VARIANTS[name]
    torch.manual_seed(len(name))
    saved, model = (
        transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(family, **{**SIZES, **deepcopy(keys)}),
            dtype=torch.float32,
            attn_implementation="eager",
        )
        for keys in (rope, rope if name in STRUCTURES else with_one_list(rope, uses_long=True))
    )
    with torch.no_grad():
        for key, value in saved.named_parameters():
            if "norm" in key or key.endswith("bias"):
                value.add_(torch.randn(value.shape) * 0.3)
        for key, value in saved.named_buffers():
            if "correction_bias" in key:
                value.copy_(torch.randn(value.shape) * 0.2)
    folder = root / name
    saved.save_pretrained(folder)
    model.load_state_dict(saved.state_dict())
    logprobs_R, _, gradients = scores_and_gradients(model, batch_of())
    return folder, logprobs_R, gradients


def by_megatron(folder, layout, batch):
    grid, rollout = LAYOUTS[layout]
    arch = for_run(arch_from_folder(folder), LONGEST)
    actor = {"clip_grad": 0.0, "use_distributed_optimizer": False, "max_tokens_per_microbatch": 120}
    actor["use_prefix_grouper"] = layout in GROUPED
    rollout = {"prompt_length": 20, "response_length": 20, **rollout}
    with pytest.MonkeyPatch.context() as patch:
        if layout == "uncompiled":
            patch.setattr(model_of_megatron, "compiles", lambda dtype: False)
        policy = make_policy(arch, grid, seed=None, actor=actor, rollout=rollout)
    load_from_hf(folder, arch, policy.layout(), policy.named_tensors())
    logprobs = scores(policy, batch)[0]
    policy.start_optimizer(CONSTANT)
    policy.update(own_part(batch, policy), build(AlgorithmConfig(name="sft"), RolloutConfig()))
    return logprobs, full_gradients(policy)


CASES = [(name, layout) for name in VARIANTS for layout in ("single", "uncompiled")]
CASES += [(name, layout) for name in SCALED for layout in ("tp2_pp2", "cp2", "exact_tp2")]
CASES += [(name, layout) for name in ("windows", "some_windows") for layout in ("tp2_pp2", "cp2", "exact_tp2")]
CASES += [("windows_of_experts", "tp2_ep2"), ("dense_layers", "ep2_pp2"), ("biased_router", "ep2_pp2")]
CASES += [("biased_router", "tp2_ep2"), ("biased_router", "cp2")]
CASES += [(name, layout) for name in ("latent", "latent_keys") for layout in ("tp2_pp2", "cp2", "ep2_pp2", "tp2_ep2")]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_log_probabilities_and_gradients_are_those_of_transformers(name, layout, tmp_path_factory):
    folder, expected, gradients = model_of(name, tmp_path_factory.getbasetemp())
    for logprobs, found in run_ranks(LAYOUTS[layout][0].world_size, by_megatron, str(folder), layout, batch_of()):
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=PARITY)
        names = locate_tensors(arch_from_folder(folder), {key: tuple(each.shape) for key, each in gradients.items()})
        for key, gradient in found.items():
            theirs = gradients[names[key].stored][names[key].index]
            torch.testing.assert_close(gradient, theirs, rtol=0, atol=GRADIENT * float(theirs.abs().max()))
