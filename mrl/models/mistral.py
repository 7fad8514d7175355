"""Mistral: the plain decoder; all layers have a sliding window if config.json sets one."""

from mrl.models._decoder import decoder_family
from mrl.models._keys import config_keys
from mrl.models._windows import ALL_LAYERS

FAMILY = decoder_family(
    "mistral",
    "MistralForCausalLM",
    trtllm_architecture="MistralForCausalLM",
    keys=config_keys(),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "intermediate_size": 14336,
        "sliding_window": 4096,
    },
    fixed=lambda arch: {},
    windows=ALL_LAYERS,
)
