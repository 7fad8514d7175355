"""Llama 2 and 3: the plain decoder, with llama3 rotary scaling where config.json asks for it."""

from functools import partial

from mrl.models._decoder import DECODER, arch_from_config, config_from_arch
from mrl.models._keys import config_keys
from mrl.models.base import Family

FAMILY = Family(
    hf_model_type="llama",
    hf_architecture="LlamaForCausalLM",
    params=DECODER,
    keys=config_keys(
        held={
            "attention_bias": (False, "it puts a bias on the output projection"),
            "mlp_bias": (False, "the MLP has no bias"),
        },
        without_effect={"pretraining_tp": "how older transformers cut the products"},
    ),
    arch_from_hf=partial(
        arch_from_config,
        family="llama",
        defaults={
            "num_key_value_heads": None,
            "head_dim": None,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
    ),
    arch_to_hf=partial(
        config_from_arch,
        model_type="llama",
        architecture="LlamaForCausalLM",
        fixed={"attention_bias": False, "mlp_bias": False},
    ),
    trtllm_architecture="LlamaForCausalLM",
)
