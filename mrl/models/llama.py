"""Llama 2 and 3: the plain decoder, with llama3 rotary scaling where config.json asks for it."""

from mrl.models._decoder import decoder_family
from mrl.models._keys import config_keys

FAMILY = decoder_family(
    "llama",
    "LlamaForCausalLM",
    keys=config_keys(
        held={
            "attention_bias": (False, "it puts a bias on the output projection"),
            "mlp_bias": (False, "the MLP has no bias"),
        },
        without_effect={"pretraining_tp": "how older transformers cut the products"},
    ),
    defaults={"num_key_value_heads": None, "max_position_embeddings": 2048},
    fixed=lambda arch: {"attention_bias": False, "mlp_bias": False},
)
