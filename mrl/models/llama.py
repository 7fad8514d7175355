"""Llama 2 and 3: the plain decoder."""

from mrl.models._decoder import decoder_family
from mrl.models._keys import config_keys

FAMILY = decoder_family(
    "llama",
    "LlamaForCausalLM",
    trtllm_architecture="LlamaForCausalLM",
    keys=config_keys(
        required_values={
            "attention_bias": (False, "it adds a bias to the output projection"),
            "mlp_bias": (False, "a bias in the MLP is not supported"),
        },
        without_effect={"pretraining_tp": "older transformers used it to split matrix products"},
    ),
    defaults={"num_key_value_heads": None, "max_position_embeddings": 2048},
    fixed=lambda arch: {"attention_bias": False, "mlp_bias": False},
)
