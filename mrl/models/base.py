"""What a model family is: an `ArchSpec` read from config.json, and a table of `ParamSpec` rows.

Owns the vocabulary that tables are written in. A family is one file in this folder that defines `FAMILY`. It knows no
layout: `resharding/` turns (arch, table) into each rank's shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling (transformers `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class MoeSpec:
    """The mixture of experts that takes the place of the MLP in every layer.

    Attributes:
        num_experts: Experts of a layer.
        top_k: Experts that a token goes to.
        intermediate_size: Width of an expert.
        norm_topk_prob: The chosen experts' probabilities are scaled to a sum of 1; otherwise they stay what the softmax
            over all experts gave them.
        shared_intermediate_size: Width of the expert that every token goes to, behind a sigmoid gate; 0: none.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    shared_intermediate_size: int = 0


@dataclass(frozen=True)
class ArchSpec:
    """The structure of a decoder: everything that shapes its weights and its forward pass.

    Attributes:
        family: File in `mrl/models`.
        vocab_size: True vocabulary, without padding: embedding rows of the Hugging Face checkpoint.
        qkv_bias: Bias on the query, key and value projections.
        qk_norm: RMSNorm over the head dimension of queries and keys.
        moe: None: a dense MLP of `intermediate_size` in every layer.
        value_head: A linear map to one number stands in place of the output layer: a critic.
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
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    moe: MoeSpec | None = None
    value_head: bool = False


def critic_of(arch: ArchSpec) -> ArchSpec:
    """The critic with the layers of a model: a value head in place of the output layer."""
    return replace(arch, tie_word_embeddings=False, value_head=True)


def moe_of(arch: ArchSpec) -> MoeSpec:
    """The mixture of experts of a model that has one.

    Raises:
        ValueError: The model is dense.
    """
    if arch.moe is None:
        raise ValueError(f"this {arch.family} model has no experts")
    return arch.moe


class Kind(Enum):
    """How a tensor is split; each layout has one rule per kind."""

    REPLICATED = "replicated"
    VOCAB = "vocab"
    ROW = "row"
    QKV = "qkv"
    GATE_UP = "gate_up"
    EXPERT_GATE_UP = "expert_gate_up"
    EXPERT_DOWN = "expert_down"

    @property
    def is_expert(self) -> bool:
        """Whether a row stands for one tensor of each expert."""
        return self in (Kind.EXPERT_GATE_UP, Kind.EXPERT_DOWN)


class Place(Enum):
    """Which pipeline stage holds a tensor."""

    FIRST = "first"
    LAYER = "layer"
    LAST = "last"


@dataclass(frozen=True)
class ParamSpec:
    """One row of a family's table; `{layer}` in a name stands for the layer's index, `{expert}` for the expert's.

    An expert row stands for as many tensors as there are experts in the Hugging Face checkpoint and in Megatron, and
    for one tensor in the native engine, in which the experts' rows lie one after the other.

    Attributes:
        hf: Hugging Face names, in the order in which Megatron fuses them (q, k, v; gate, up); one name where the
            checkpoint has them in one tensor already, their rows one after the other in this order.
        shapes: Shape of each part, as words of `dims` ("q hidden": [num_heads x head_dim, hidden_size]).
        megatron: Megatron-Core name with its local (not TransformerEngine) layer spec.
        megatron_te: The name under TransformerEngine's layer spec, where it differs.
        native: Name in the native engine.
        trtllm: TensorRT-LLM's name; two for [gate; up] where it keeps them apart, the activated branch first; none
            where it has no such tensor, so that the family cannot be written for it.
        trtllm_dtype: The dtype in which TensorRT-LLM wants the tensor, whatever the model's; None: the model's.
        when: The row exists only where this holds (tied embeddings, biases ...).
    """

    hf: tuple[str, ...]
    shapes: tuple[str, ...]
    megatron: str
    native: str
    kind: Kind
    place: Place
    megatron_te: str | None = None
    trtllm: tuple[str, ...] = ()
    trtllm_dtype: str | None = None
    when: Callable[[ArchSpec], bool] = lambda arch: True


def dims(arch: ArchSpec) -> dict[str, int]:
    """The words that `ParamSpec.shapes` is written in -> elements."""
    return {
        "vocab": arch.vocab_size,
        "hidden": arch.hidden_size,
        "ffn": arch.intermediate_size,
        "q": arch.num_heads * arch.head_dim,
        "kv": arch.num_kv_heads * arch.head_dim,
        "head": arch.head_dim,
        "one": 1,
        "experts": arch.moe.num_experts if arch.moe else 0,
        "expert_ffn": arch.moe.intermediate_size if arch.moe else 0,
        "shared_ffn": arch.moe.shared_intermediate_size if arch.moe else 0,
    }


@dataclass(frozen=True)
class ConfigKeys:
    """What becomes of the keys of a family's config.json.

    Attributes:
        read: They shape the `ArchSpec`, or the family's `arch_from_hf` refuses them.
        held: Key -> the one value that it may have, and why.
        without_effect: Key -> why log-probabilities do not depend on it.
    """

    read: frozenset[str]
    held: Mapping[str, tuple[Any, str]]
    without_effect: Mapping[str, str]

    @property
    def all(self) -> frozenset[str]:
        """Every key of the three lists."""
        return self.read | self.held.keys() | self.without_effect.keys()


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        hf_model_type: `model_type` in config.json.
        hf_architecture: `architectures[0]` in config.json.
        params: The table.
        keys: What becomes of the keys of its config.json.
        arch_from_hf: config.json as a dict, its `keys` checked -> ArchSpec; raises UserError for a structure that
            mrl does not build.
        arch_to_hf: ArchSpec -> config.json.
        trtllm_architecture: `architecture` in TensorRT-LLM's config.json; None: it has no model with this structure.
    """

    hf_model_type: str
    hf_architecture: str
    params: tuple[ParamSpec, ...]
    keys: ConfigKeys
    arch_from_hf: Callable[[dict[str, Any]], ArchSpec]
    arch_to_hf: Callable[[ArchSpec], dict[str, Any]]
    trtllm_architecture: str | None = None
