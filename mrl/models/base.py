"""The vocabulary of a model family: `ArchSpec` (its structure) and `ParamSpec` (one parameter and its names).

To add a family, write one file in this folder that defines `FAMILY`, a `Family`; `qwen2.py` is the shortest example.
This file knows nothing about parallelism: `resharding/` combines an ArchSpec and a parameter table into the shards of
each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies for longer sequences, in the words of transformers' `rope_parameters`.

    A setting that the type does not have, or that config.json leaves to transformers' default, is None.

    Attributes:
        rope_type: "linear", "dynamic", "yarn", "longrope" or "llama3".
        factor: Ratio of the extended to the original context length.
        original_max_position_embeddings: Context length before scaling, tokens.
        low_freq_factor: llama3: wavelengths above original / low_freq_factor are divided by `factor`.
        high_freq_factor: llama3: wavelengths below original / high_freq_factor are kept.
        attention_factor: yarn, longrope: factor of cosine and sine.
        beta_fast: yarn: rotations within the original length from which on a frequency is kept.
        beta_slow: yarn: rotations up to which a frequency is divided by `factor`.
        mscale: yarn: weight of log(factor) in the numerator of the attention factor.
        mscale_all_dim: yarn: weight of log(factor) in its denominator.
        truncate: yarn: whether the interpolated range is extended to complete dimensions.
        short_factor: longrope: divisor of each frequency, for runs up to the original length.
        long_factor: longrope: divisor of each frequency, for longer runs.
        uses_long_factor: longrope: the run's choice of the two (`_positions.for_run`), no part of the model; None: none
            was made.
    """

    rope_type: str
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    uses_long_factor: bool | None = None


@dataclass(frozen=True)
class MoeSpec:
    """Mixture-of-experts layer that replaces the MLP in decoder layers.

    Attributes:
        num_experts: Experts per layer.
        top_k: Experts per token.
        intermediate_size: FFN width of one expert.
        norm_topk_prob: True if the routing probabilities of the selected experts are rescaled to sum to 1. Otherwise
            they stay as the softmax over all experts computed them.
        shared_intermediate_size: FFN width of the shared expert, which every token passes through; 0: no shared expert.
        shared_gate: True if a sigmoid gate scales the shared expert's output.
        score_function: Function from a router's logits to the experts' scores.
        score_bias: True if the experts are selected by their scores plus a bias, which is no part of their weights.
        num_groups: Groups of consecutive experts; an expert is selected only from the `top_groups` groups whose two
            best scores (with the bias) have the largest sums.
        top_groups: See `num_groups`.
        scaling_factor: Factor of the selected experts' weights.
        dense_layers: Indices of the layers with a dense MLP of width `ArchSpec.intermediate_size`, ascending.
        biases: True if the router and the experts' projections have a bias.
        activation_limit: Bound of a clamped activation: the gate is clamped to at most the limit and `up` to plus or
            minus the limit, and the result is (up + 1) * gate * sigmoid(1.702 * gate). None: silu(gate) * up.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    shared_intermediate_size: int = 0
    shared_gate: bool = True
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    score_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    scaling_factor: float = 1.0
    dense_layers: tuple[int, ...] = ()
    biases: bool = False
    activation_limit: float | None = None


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention: sizes under the names of config.json.

    A head's query and key have a part that is not rotated and one that is, whose key all heads share. The rotated part
    of a head is stored with the pairs of a rotation in neighbouring dimensions.

    Attributes:
        q_lora_rank: Size of the latent vector of queries; None: queries are a product of the hidden state.
        kv_lora_rank: Size of the latent vector of keys and values.
        qk_nope_head_dim: Dimensions of a head's query and key that are not rotated; they come first.
        qk_rope_head_dim: Dimensions that are rotated.
        v_head_dim: Dimensions of a head's value.
        norm_eps: Epsilon of the norms of the latent vectors, which transformers reads from no key.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        """Dimensions of a head's query and key, `ArchSpec.head_dim`."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_dim(self) -> int:
        """Numbers that a token has in a cache of latent vectors: the latent vector and the rotated part of its key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class LinearAttentionSpec:
    """Gated delta nets (arXiv 2412.06464) instead of softmax attention in some layers.

    Attributes:
        layers: Indices of these layers, ascending.
        num_key_heads: Heads of queries and keys.
        num_value_heads: Heads of values, a multiple of `num_key_heads`; consecutive ones share a key head.
        key_head_dim: Dimensions of a head's query and key.
        value_head_dim: Dimensions of a head's value.
        conv_kernel: Tokens that the causal convolution over queries, keys and values reads, the token's own included.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    @property
    def key_size(self) -> int:
        """Rows of the projection of all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Rows of the projection of all values."""
        return self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size


Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class ArchSpec:
    """Structure of a decoder: the sizes and options that determine its weights and its forward pass.

    Attributes:
        family: Name of the family's file in `mrl/models`, for example "qwen2".
        vocab_size: Vocabulary size without padding: embedding rows of the Hugging Face checkpoint.
        qkv_bias: True if the query, key and value projections have a bias.
        output_bias: True if the output projection of attention has a bias.
        attention_sinks: True if each query head has a learned logit that joins its softmax and has no value.
        qk_norm: True if queries and keys pass through an RMSNorm over the head dimension.
        rope_scaling: Scaling of the rotary frequencies; None: they are not scaled.
        partial_rotary_factor: Fraction of each head's dimensions that is rotated; the last dimensions are not.
        moe: Experts of the layers; None: a dense MLP of width `intermediate_size` in every layer.
        value_head: True if the output layer is a linear map to one value (a critic) instead of the vocabulary.
        sliding_window: Tokens that a query of a windowed layer attends to: its own and those just before it; None if no
            layer is windowed.
        windowed_layers: Indices of the layers whose attention has the sliding window, ascending.
        local_rope_theta: Rotary base of the windowed layers, whose frequencies are not scaled; None: as in all layers.
        attention_scale: Factor of attention's scores; None: head_dim ** -0.5.
        activation: Function of the MLP's gate; "gelu_tanh" is GELU in its approximation with tanh.
        zero_centered_norms: True if a norm multiplies by 1 + weight instead of the weight.
        post_norms: True if the outputs of attention and MLP pass through a norm before they are added to the residual.
        scaled_embeddings: True if embeddings are multiplied by `embedding_scale`.
        mla: Latent attention; None: queries, keys and values are products of the hidden state. With it `head_dim` is
            that of queries and keys, and each head has its own key and value.
        output_gate: True if the query projection also gives a gate for each dimension of a head, whose sigmoid
            multiplies the output of softmax attention. Its rows follow those of the head's query.
        linear_attention: Gated delta nets in some layers; None: softmax attention in every layer.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    attention_sinks: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0
    moe: MoeSpec | None = None
    value_head: bool = False
    sliding_window: int | None = None
    windowed_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    attention_scale: float | None = None
    activation: Activation = "silu"
    zero_centered_norms: bool = False
    post_norms: bool = False
    scaled_embeddings: bool = False
    mla: MlaSpec | None = None
    output_gate: bool = False
    linear_attention: LinearAttentionSpec | None = None

    def window_of(self, layer: int) -> int | None:
        """Returns the sliding window of a layer's attention; None: the layer attends to all earlier tokens."""
        return self.sliding_window if layer in self.windowed_layers else None

    @property
    def norm_offset(self) -> float:
        """Number that a norm adds to its weight."""
        return 1.0 if self.zero_centered_norms else 0.0

    @property
    def embedding_scale(self) -> float | None:
        """Factor of the embeddings before it is rounded to their dtype: the root of their size; None: there is none."""
        return math.sqrt(self.hidden_size) if self.scaled_embeddings else None

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts."""
        dense = range(self.num_layers) if self.moe is None else self.moe.dense_layers
        return tuple(layer for layer in range(self.num_layers) if layer not in dense)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the layers with linear attention."""
        return () if self.linear_attention is None else self.linear_attention.layers

    @property
    def softmax_layers(self) -> tuple[int, ...]:
        """Indices of the layers with softmax attention."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.linear_layers)

    @property
    def has_dense_layers(self) -> bool:
        """True if a layer has a dense MLP, as all layers of a model without experts have."""
        return len(self.moe_layers) < self.num_layers

    @property
    def value_dim(self) -> int:
        """Number of dimensions of a head's value."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of each head that are rotated: the first ones, with `mla` the last."""
        if self.mla is not None:
            return self.mla.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)


def rotary_kinds(arch: ArchSpec) -> tuple[ArchSpec, ArchSpec]:
    """Returns the model with the rotary settings of its layers without a window, and with those of its windowed ones.

    The two are the same object unless the windowed layers have their own.
    """
    if arch.local_rope_theta is None:
        return arch, arch
    return arch, replace(arch, rope_theta=arch.local_rope_theta, rope_scaling=None)


def layer_kinds(arch: ArchSpec) -> list[tuple[ArchSpec, int]]:
    """Returns (model with one layer, number of such layers) for each kind of layer, those with experts first.

    Kinds differ in the MLP and in whether attention is linear. Sizes of the whole model are sums over these. Sliding
    windows are left out.
    """
    counts: dict[tuple[bool, bool], int] = {}
    for layer in range(arch.num_layers):
        kind = layer not in arch.moe_layers, layer in arch.linear_layers
        counts[kind] = counts.get(kind, 0) + 1
    return [(_one_layer(arch, *kind), counts[kind]) for kind in sorted(counts)]


def _one_layer(arch: ArchSpec, is_dense: bool, is_linear: bool) -> ArchSpec:
    """Returns the model with a single layer of a kind."""
    moe = None if arch.moe is None or is_dense else replace(arch.moe, dense_layers=())
    linear = None
    if arch.linear_attention is not None and is_linear:
        linear = replace(arch.linear_attention, layers=(0,))
    return replace(arch, num_layers=1, sliding_window=None, windowed_layers=(), moe=moe, linear_attention=linear)


def critic_of(arch: ArchSpec) -> ArchSpec:
    """Returns the structure of a critic with this model's layers: a value head instead of the output layer."""
    return replace(arch, tie_word_embeddings=False, value_head=True)


def moe_of(arch: ArchSpec) -> MoeSpec:
    """Returns the experts of an MoE model.

    Raises:
        ValueError: The model is dense.
    """
    if arch.moe is None:
        raise ValueError(f"this {arch.family} model has no experts")
    return arch.moe


def mla_of(arch: ArchSpec) -> MlaSpec:
    """Returns the latent attention of a model.

    Raises:
        ValueError: The model has none.
    """
    if arch.mla is None:
        raise ValueError(f"this {arch.family} model has no latent attention")
    return arch.mla


def linear_attention_of(arch: ArchSpec) -> LinearAttentionSpec:
    """Returns the linear attention of a model.

    Raises:
        ValueError: The model has none.
    """
    if arch.linear_attention is None:
        raise ValueError(f"this {arch.family} model has no linear attention")
    return arch.linear_attention


class ShardKind(Enum):
    """Sharding of a parameter under tensor and expert parallelism; each layout of `resharding/` has a rule per kind.

    KEY_HEADS: rows of linear attention. The rows of each part are divided evenly among the key heads; a rank stores,
    for each of its key heads, the rows of every part.
    """

    REPLICATED = "replicated"
    VOCAB = "vocab"
    COLUMN = "column"
    ROW = "row"
    QKV = "qkv"
    GATE_UP = "gate_up"
    KEY_HEADS = "key_heads"
    EXPERT_GATE_UP = "expert_gate_up"
    EXPERT_DOWN = "expert_down"
    EXPERT_REPLICATED = "expert_replicated"

    @property
    def is_expert(self) -> bool:
        """True if the table row describes one tensor per expert."""
        return self in (ShardKind.EXPERT_GATE_UP, ShardKind.EXPERT_DOWN, ShardKind.EXPERT_REPLICATED)


class LayerKind(Enum):
    """Layers that have a parameter: all, those with one kind of MLP, or those with one kind of attention."""

    ALL = "all"
    DENSE = "dense"
    MOE = "moe"
    SOFTMAX = "softmax"
    LINEAR = "linear"


class PipelineStage(Enum):
    """Pipeline stage that has a parameter: the first, the one with the layer, or the last."""

    FIRST = "first"
    LAYER = "layer"
    LAST = "last"


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of a family, with its name in every format.

    In a name, `{layer}` is the layer index and `{expert}` the expert index. An expert row describes one tensor per
    expert in the Hugging Face checkpoint and in Megatron, and a single tensor in the native engine, which concatenates
    the experts along dimension 0.

    Attributes:
        hf: Hugging Face names in the order in which Megatron fuses them (q, k, v; gate, up). A single name if the
            checkpoint has the fused tensor, with its rows in this order; a name that is there several times has the
            rows of these parts one after another.
        shapes: Shape of each part, written in the words of `dims`: "q hidden" is [num_heads x head_dim, hidden_size].
        megatron: Megatron-Core name under the local layer spec.
        megatron_te: Megatron-Core name under TransformerEngine's layer spec, if different.
        native: Name in the native engine.
        trtllm: TensorRT-LLM names; two for [gate; up] if TensorRT-LLM keeps them apart, the activated branch first;
            empty if TensorRT-LLM has no such tensor, in which case the family cannot be converted to it.
        trtllm_dtype: Dtype that TensorRT-LLM requires for this tensor; None: that of the other formats.
        vllm_dtype: Dtype that vLLM requires for this tensor; None: that of the other formats.
        dtype: Dtype of this tensor in all formats; None: the model's dtype.
        layers: Layers that have this parameter.
        is_buffer: True if training never changes it by a gradient: Megatron has a buffer instead of a parameter.
        when: Predicate on the structure: whether a model has this parameter (tied embeddings, biases ...).
    """

    hf: tuple[str, ...]
    shapes: tuple[str, ...]
    megatron: str
    native: str
    kind: ShardKind
    place: PipelineStage
    megatron_te: str | None = None
    trtllm: tuple[str, ...] = ()
    trtllm_dtype: str | None = None
    vllm_dtype: str | None = None
    dtype: str | None = None
    layers: LayerKind = LayerKind.ALL
    is_buffer: bool = False
    when: Callable[[ArchSpec], bool] = lambda arch: True


def dims(arch: ArchSpec) -> dict[str, int]:
    """Returns the size of each word that `ParamSpec.shapes` uses."""
    return {
        **_latent_dims(arch),
        **_linear_dims(arch),
        "vocab": arch.vocab_size,
        "hidden": arch.hidden_size,
        "ffn": arch.intermediate_size,
        "q": arch.num_heads * arch.head_dim,
        "q_gate": 2 * arch.num_heads * arch.head_dim,
        "kv": arch.num_kv_heads * arch.head_dim,
        "head": arch.head_dim,
        "heads": arch.num_heads,
        "one": 1,
        "experts": arch.moe.num_experts if arch.moe else 0,
        "expert_ffn": arch.moe.intermediate_size if arch.moe else 0,
        "shared_ffn": arch.moe.shared_intermediate_size if arch.moe else 0,
    }


def _latent_dims(arch: ArchSpec) -> dict[str, int]:
    mla = arch.mla
    if mla is None:
        return {}
    return {
        "q_latent": mla.q_lora_rank or 0,
        "kv_latent": mla.kv_lora_rank,
        "kv_latent_rope": mla.cache_dim,
        "kv_up": arch.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim),
        "v": arch.num_heads * mla.v_head_dim,
    }


def _linear_dims(arch: ArchSpec) -> dict[str, int]:
    linear = arch.linear_attention
    if linear is None:
        return {}
    return {
        "linear_key": linear.key_size,
        "linear_value": linear.value_size,
        "linear_qkvz": linear.channels + linear.value_size,
        "linear_heads": linear.num_value_heads,
        "linear_ba": 2 * linear.num_value_heads,
        "linear_value_head": linear.value_head_dim,
        "linear_kernel": linear.conv_kernel,
    }


@dataclass(frozen=True)
class ConfigKeys:
    """Treatment of each key of a family's config.json: read, restricted to one value, or ignored.

    Attributes:
        read: Keys that determine the `ArchSpec`, or that `arch_from_hf` checks.
        required_values: Key -> (the only supported value, the reason).
        without_effect: Key -> why log-probabilities do not depend on it.
    """

    read: frozenset[str]
    required_values: Mapping[str, tuple[Any, str]]
    without_effect: Mapping[str, str]

    @property
    def all(self) -> frozenset[str]:
        """All keys of the three lists."""
        return self.read | self.required_values.keys() | self.without_effect.keys()


@dataclass(frozen=True)
class Family:
    """Model family: its parameter table and its config.json.

    Attributes:
        hf_model_type: `model_type` in config.json.
        hf_architecture: `architectures[0]` in config.json.
        params: Parameter table, one row per parameter.
        keys: Treatment of the keys of config.json.
        arch_from_hf: Function from a parsed config.json, whose `keys` were checked, to an ArchSpec; raises UserError
            for a structure that mrl does not implement.
        arch_to_hf: Function from an ArchSpec to config.json.
        trtllm_architecture: `architecture` in TensorRT-LLM's config.json; None: TensorRT-LLM has no such model.
        extra_layers: True if a checkpoint may have layers for multi-token prediction, after the last or under `mtp`:
            they are not loaded.
        fused_experts: True if the checkpoint has the experts of a layer in one tensor, transposed, with alternating
            columns of gate and up; the table names them one by one. vLLM has alternating rows.
        aliases: Further values of `model_type` of models that transformers computes as this family.
        vllm_names: (part of a Hugging Face name, vLLM's) for names that differ.
        vllm_windows: Function from an ArchSpec to the layers to which vLLM gives the sliding window, if there is one.
    """

    hf_model_type: str
    hf_architecture: str
    params: tuple[ParamSpec, ...]
    keys: ConfigKeys
    arch_from_hf: Callable[[dict[str, Any]], ArchSpec]
    arch_to_hf: Callable[[ArchSpec], dict[str, Any]]
    trtllm_architecture: str | None = None
    extra_layers: bool = False
    fused_experts: bool = False
    aliases: tuple[str, ...] = ()
    vllm_names: tuple[tuple[str, str], ...] = ()
    vllm_windows: Callable[[ArchSpec], tuple[int, ...]] = lambda arch: tuple(range(arch.num_layers))
