"""Random models of every family that vLLM's kernels for CPUs can hold, and its engine in this process."""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from mrl.config.config import RolloutConfig
from mrl.models.hf_config import arch_from_folder
from tests.engines.native.tiny import FAMILIES as NATIVE
from tests.engines.native.tiny import ROPE, SHAPE, make_checkpoint
from tests.engines.specs import spec_of
from tests.models.rope import both_spellings

# heads of 32 and experts of a multiple of 32 are the least that its kernels take
SIZES = {"vocab_size": 99, "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 160, "head_dim": 32}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MOE = {**SHAPE, **both_spellings(ROPE), "tie_word_embeddings": False, "mlp_only_layers": [], "decoder_sparse_step": 1}
LATENT = {  # its kernel for CPUs has these sizes alone
    **SIZES,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
FAMILIES = {
    # vLLM would give all layers the window that some have
    **{name: {**given, **SIZES} for name, given in NATIVE.items() if name != "qwen2_windows"},
    "qwen3_moe": {"model_type": "qwen3_moe", **MOE, **SIZES, **EXPERTS, "norm_topk_prob": True},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **MOE,
        **SIZES,
        **EXPERTS,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 96,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **SHAPE,
        **both_spellings(
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            }
        ),
        **SIZES,
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 10,
        "tie_word_embeddings": False,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **LATENT,
        **both_spellings(
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 0.8,
                "mscale_all_dim": 0.6,
            }
        ),
        "q_lora_rank": 48,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **LATENT,
        **both_spellings({"rope_type": "default", "rope_theta": 10000.0}),
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": False,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        **SHAPE,
        **both_spellings(ROPE),
        **SIZES,
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 64,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "mixtral": {
        "model_type": "mixtral",
        **SHAPE,
        **both_spellings(ROPE),
        **SIZES,
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
}
FAMILIES["gemma3_text"]["sliding_window_pattern"] = 2  # so that one of the two layers has no window
del FAMILIES["phi3"]["head_dim"]  # it has none


def save(folder, family):
    """A random model of transformers; the folder."""
    return make_checkpoint(folder, family, families=FAMILIES)


@contextmanager
def engine(folder, *, tp_group=None, dtype=torch.float32, arch=None, **settings):
    """vLLM without weights, in this rank of a job; `arch`: mrl's word on the model."""
    from mrl.engines.vllm.engine import VllmEngine

    size = 1 if tp_group is None else dist.get_world_size(tp_group)
    given = {
        "prompt_length": 64, "response_length": 64, "gpu_memory_utilization": 0.02, "max_num_seqs": 16,
        "max_num_batched_tokens": 128, "tensor_model_parallel_size": size, **settings,
    }  # fmt: skip
    spec = spec_of(
        RolloutConfig(name="vllm", **given), arch or arch_from_folder(folder), tp_group=tp_group, dtype=dtype,
        write_model_folder=lambda _: folder,
    )  # fmt: skip
    made = VllmEngine(spec)
    try:
        yield made
    finally:
        made.close()
