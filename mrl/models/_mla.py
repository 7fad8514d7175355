"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): its parameter table and config.json.

Keys and values of all heads are products of one latent vector per token, and all heads share one rotated part of the
key. Queries may come from a latent vector, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mrl.errors import UserError, shown
from mrl.models._decoder import ATTENTION
from mrl.models._keys import OF_TRANSFORMERS, TRAINING
from mrl.models._positions import score_scale
from mrl.models._rope import RopeRules
from mrl.models._values import positive_int, value_of
from mrl.models.base import ArchSpec, Family, MlaSpec, ParamSpec, PipelineStage, ShardKind

MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim")
"""Keys of config.json that this file reads."""

_SPARSE = "attention that an indexer makes sparse (DeepSeek-V3.2) is not supported"
MLA_REQUIRED: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(("index_topk", "index_n_heads", "index_head_dim"), (None, _SPARSE)),
    "moe_layer_freq": (1, "every layer after the dense ones must have experts"),
    "attention_bias": (False, "projections with biases are not supported in multi-head latent attention"),
}

MLA_WITHOUT_EFFECT: Mapping[str, str] = {
    "output_router_logits": OF_TRANSFORMERS,
    "pretraining_tp": OF_TRANSFORMERS,
    "ep_size": OF_TRANSFORMERS,
    "seq_aux": TRAINING,
    "aux_loss_alpha": TRAINING,
}
"""Keys of these models -> why log-probabilities do not depend on them."""

MLA_ROPE = RopeRules(("default", "yarn"))
"""Rotary settings of these models."""

_SELF = "model.layers.{layer}.self_attn."
_OWN = "decoder.layers.{layer}.self_attention."
_EMBEDDING, _NORM = ATTENTION[:2]
_OUTPUT = next(spec for spec in ATTENTION if spec.kind is ShardKind.ROW)


def _row(
    name: str,
    shape: str,
    megatron: str,
    native: str,
    kind: ShardKind,
    *,
    te: str | None = None,
    when: Callable[[ArchSpec], bool] = lambda arch: True,
) -> ParamSpec:
    return ParamSpec(
        hf=(f"{_SELF}{name}.weight",),
        shapes=(shape,),
        megatron=f"{_OWN}{megatron}.weight",
        megatron_te=None if te is None else f"{_OWN}{te}.layer_norm_weight",
        native=f"layers.{{layer}}.{native}",
        kind=kind,
        place=PipelineStage.LAYER,
        when=when,
    )


def _has_latent_queries(arch: ArchSpec) -> bool:
    return arch.mla is not None and arch.mla.q_lora_rank is not None


MLA: tuple[ParamSpec, ...] = (
    _EMBEDDING,
    replace(_NORM, megatron_te=None, trtllm=()),
    _row("q_proj", "q hidden", "linear_q_proj", "q", ShardKind.COLUMN, when=lambda arch: not _has_latent_queries(arch)),
    _row("q_a_proj", "q_latent hidden", "linear_q_down_proj", "q_a", ShardKind.REPLICATED, when=_has_latent_queries),
    _row(
        "q_a_layernorm",
        "q_latent",
        "q_layernorm",
        "q_a_norm",
        ShardKind.REPLICATED,
        te="linear_q_up_proj",
        when=_has_latent_queries,
    ),
    _row("q_b_proj", "q q_latent", "linear_q_up_proj", "q_b", ShardKind.COLUMN, when=_has_latent_queries),
    _row("kv_a_proj_with_mqa", "kv_latent_rope hidden", "linear_kv_down_proj", "kv_a", ShardKind.REPLICATED),
    _row("kv_a_layernorm", "kv_latent", "kv_layernorm", "kv_a_norm", ShardKind.REPLICATED, te="linear_kv_up_proj"),
    _row("kv_b_proj", "kv_up kv_latent", "linear_kv_up_proj", "kv_b", ShardKind.COLUMN),
    replace(_OUTPUT, shapes=("hidden v",), trtllm=()),
)
"""Embedding, and the attention half of a decoder layer."""


def latent_family(family: Family, defaults: Mapping[str, Any], aliases: tuple[str, ...] = ()) -> Family:
    """Returns the family with latent attention read from config.json.

    Args:
        family: Family that reads everything else.
        defaults: Values that transformers assumes for missing keys.
        aliases: `Family.aliases`.
    """

    def arch_from_hf(config: dict[str, Any]) -> ArchSpec:
        arch = family.arch_from_hf(_with_rotary_head(config, defaults))
        return _with_latent_attention(arch, config, defaults)

    return replace(family, arch_from_hf=arch_from_hf, aliases=aliases)


def _with_rotary_head(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json with the rotated part of a head as `head_dim`, as which transformers 5 writes it.

    Raises:
        UserError: Heads share keys, the rotated part is odd, or `head_dim` is another number.
    """
    heads = positive_int(config, "num_attention_heads", defaults)
    kv_heads = value_of(config, "num_key_value_heads", defaults)
    if kv_heads is not None and kv_heads != heads:
        raise UserError(
            f"config.json: num_key_value_heads is {shown(kv_heads)} and num_attention_heads {heads}; in multi-head "
            "latent attention the two are equal."
        )
    rotary = positive_int(config, "qk_rope_head_dim", defaults)
    if rotary % 2:
        raise UserError(f"config.json: qk_rope_head_dim is {rotary}; rotary embeddings need an even one.")
    if config.get("head_dim") not in (None, rotary):
        raise UserError(
            f"config.json: head_dim is {shown(config['head_dim'])}; transformers computes it as qk_rope_head_dim, "
            f"{rotary}, in this family. Remove it."
        )
    return {**config, "head_dim": rotary, "num_key_value_heads": heads}


def _with_latent_attention(arch: ArchSpec, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> ArchSpec:
    """Returns the model with the latent attention that config.json has.

    Args:
        arch: Model whose `head_dim` is the rotated part of a head.
        config: Parsed config.json.
        defaults: Values that transformers assumes for missing keys.

    Raises:
        UserError: A key is missing or wrong.
    """
    without_latent = value_of(config, "q_lora_rank", defaults) is None
    nope, rope, value, latent = (
        positive_int(config, key, defaults)
        for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    if config.get("qk_head_dim") not in (None, nope + rope):
        raise UserError(
            f"config.json: qk_head_dim is {shown(config['qk_head_dim'])}; expected qk_nope_head_dim + "
            f"qk_rope_head_dim, {nope + rope}."
        )
    mla = MlaSpec(None if without_latent else positive_int(config, "q_lora_rank", defaults), latent, nope, rope, value)
    return replace(arch, head_dim=nope + rope, mla=mla, attention_scale=score_scale(arch.rope_scaling, nope + rope))


def mla_keys(mla: MlaSpec) -> dict[str, Any]:
    """Returns the keys of config.json of a model's latent attention."""
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "qk_head_dim": mla.qk_head_dim,
        "head_dim": mla.qk_rope_head_dim,
        "attention_bias": False,
    }
