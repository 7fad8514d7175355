"""Mixtral: the plain decoder with experts instead of the MLP; the selected experts' probabilities sum to 1."""

from functools import partial

from mrl.models._decoder import ATTENTION, HEAD, decoder_family
from mrl.models._keys import TRAINING, config_keys
from mrl.models._moe import ROUTER_WITHOUT_EFFECT, experts_key, moe_layer, moe_spec
from mrl.models._windows import ALL_LAYERS
from mrl.models.base import moe_of

FAMILY = decoder_family(
    "mixtral",
    "MixtralForCausalLM",
    trtllm_architecture="MixtralForCausalLM",
    params=(*ATTENTION, *moe_layer("model.layers.{layer}.block_sparse_moe.", gate="w1", up="w3", down="w2"), *HEAD),
    keys=config_keys(
        "num_local_experts",
        "num_experts",
        "num_experts_per_tok",
        without_effect={**ROUTER_WITHOUT_EFFECT, "router_jitter_noise": TRAINING},
    ),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
    fixed=lambda arch: {
        "num_local_experts": moe_of(arch).num_experts,
        "num_experts_per_tok": moe_of(arch).top_k,
    },
    windows=ALL_LAYERS,
    moe=partial(moe_spec, num_experts_key=experts_key, intermediate_size="intermediate_size"),
)
