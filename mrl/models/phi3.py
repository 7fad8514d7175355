"""Phi 3 and 4: the plain decoder; its checkpoint has query, key and value in one tensor, and gate and up in another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mrl.errors import UserError
from mrl.models._decoder import DECODER, arch_from_config, config_from_arch
from mrl.models.base import ArchSpec, Family, Kind, ParamSpec

_FUSED = {
    Kind.QKV: "model.layers.{layer}.self_attn.qkv_proj.weight",
    Kind.GATE_UP: "model.layers.{layer}.mlp.gate_up_proj.weight",
}


def _fused(row: ParamSpec) -> ParamSpec:
    return replace(row, hf=(_FUSED[row.kind],)) if row.kind in _FUSED else row


def arch_from_hf(config: Mapping[str, Any]) -> ArchSpec:
    """As `Family.arch_from_hf`."""
    arch = arch_from_config(
        config,
        family="phi3",
        defaults={
            "num_key_value_heads": None,
            "head_dim": None,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    )
    window = config.get("sliding_window")
    if window is not None and window < arch.max_position_embeddings:
        raise UserError(
            f"config.json: sliding_window is {window}, below max_position_embeddings={arch.max_position_embeddings}; "
            "mrl's 'phi3' attends to the whole context. Phi 4 does too."
        )
    return arch


def arch_to_hf(arch: ArchSpec) -> dict[str, Any]:
    """As `Family.arch_to_hf`."""
    return config_from_arch(
        arch, model_type="phi3", architecture="Phi3ForCausalLM", fixed={"sliding_window": None, "pad_token_id": None}
    )


FAMILY = Family(
    hf_model_type="phi3",
    hf_architecture="Phi3ForCausalLM",
    params=tuple(_fused(row) for row in DECODER if row.hf[0].rsplit(".", 1)[1] != "bias"),
    arch_from_hf=arch_from_hf,
    arch_to_hf=arch_to_hf,
    trtllm_architecture="LlamaForCausalLM",
)
