"""Forward pass of the decoder on one rank of a replica, for inference.

Computes logits from token ids with fused weights; the attention over the cache is an argument. Branches on fields of
`ArchSpec`, never on a model family. Reads the engine's stored tensors through `packed_linear.py`; `refresh` must follow
each update of them.

Shapes: P packed tokens, N heads and K KV heads of this rank, D head dim, H hidden, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mrl.distributed.collectives import sum_in_rank_order
from mrl.engines.native.experts import DOWN_BIAS, NAMES, FindAdapters, MoeLayer
from mrl.engines.native.fp8_scales import Scales
from mrl.engines.native.kv_cache import KVCache, state_shape
from mrl.engines.native.latent_attention import HeadProducts, LatentHeads
from mrl.engines.native.linear_attention import DeltaNetLayer, SequenceStates
from mrl.engines.native.packed_linear import Linear, LinearAdapters, compute_dtype
from mrl.engines.native.torch_ops import Attention, HeadNorms, Heads, Operations, Rotation
from mrl.errors import UserError
from mrl.models.base import Activation, ArchSpec, linear_attention_of, rotary_kinds
from mrl.models.kernels.rope_tables import rotary_tables
from mrl.resharding.native import expert_shard

_KV_B = "kv_b"
"""Name in a layer of the matrix of latent attention's `HeadProducts`."""


@dataclass
class _SoftmaxAttention:
    index: int  # among the layers with softmax attention
    heads: FusedHeads | LatentHeads
    sinks: Tensor | None
    o: Linear
    is_windowed: bool


@dataclass
class _Layer:
    input_norm: Tensor
    mixer: _SoftmaxAttention | DeltaNetLayer
    post_norm: Tensor
    mlp: Mlp | MoeLayer
    out_norms: tuple[Tensor, Tensor] | None  # of the outputs of attention and MLP


@dataclass(frozen=True)
class FusedHeads:
    """Projection of a layer with keys and values of its own for each KV head.

    Attributes:
        qkv: Product that gives queries, keys and values.
        head_norms: Weights of the norms of queries and keys; None: there are none.
        head_dim: D.
        num_gates: Heads whose gates follow queries, keys and values; 0: the model has no output gates.
    """

    qkv: Linear
    head_norms: HeadNorms | None
    head_dim: int
    num_gates: int = 0

    @property
    def norms(self) -> list[Tensor]:
        """Weights of the norms."""
        return [*(self.head_norms or ())]

    def __call__(self, x_PH: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns queries [P, N, D], keys [P, K, D], values [P, K, D], and output gates [P, N x D] or None."""
        qkv, gate = self.qkv(x_PH).view(x_PH.size(0), -1, self.head_dim), None
        if self.num_gates:
            qkv, gate = qkv[:, : -self.num_gates].contiguous(), qkv[:, -self.num_gates :].flatten(1)
        return *rotate(qkv, self.head_norms), gate

    def output(self, attended_PND: Tensor) -> Tensor:
        """Returns the heads' values [P, N x D]."""
        return attended_PND.flatten(1)


class Mlp:
    """Gated MLP of a dense layer; returns this rank's share of the sum."""

    def __init__(self, gate_up: Linear, down: Linear, operations: Operations, activation: Activation) -> None:
        self._activation: Activation = activation
        self._gate_up = gate_up
        self._down = down
        self._operations = operations

    def __call__(self, x_PH: Tensor) -> tuple[Tensor, None]:
        """Returns the output [P, H], and None for the routing record."""
        return self._operations.mlp(x_PH, self._gate_up, self._down, self._activation), None


class Decoder:
    """Pre-norm decoder with rotary positions, grouped-query or latent attention, and a gated MLP or MoE.

    Args:
        arch: Sizes and family of the model.
        weights: Stored tensors of this rank, by the names of `resharding/native.py`.
        tp_group: Ranks of the replica; None: a replica of one rank.
        max_positions: Positions for which rotary tables are computed.
        ep_size: Expert-parallel size of the replica.
        scales: Scales of the weights stored in FP8, by weight name.
        operations: Elementwise operations; None: PyTorch's.
        exact: Use the products and sums over ranks that the actor shares; `operations` must be of that kind.
        adapters: Function (name of a stored tensor, first row, row after the last) -> low-rank adapters of these rows;
            None: there are no adapters.

    Attributes:
        dtype: Dtype of activations, keys and values.
        operations: Elementwise operations.
        num_heads: Query heads of this rank.
        num_kv_heads: Key/value heads of this rank in the cache; 1 with latent attention.
        cache_dim: Dimensions of such a head.
        is_capturable: Whether decoding can be captured in CUDA graphs.
        has_expert_adapters: Whether experts have low-rank adapters beside their weights.
    """

    def __init__(
        self,
        arch: ArchSpec,
        weights: Mapping[str, Tensor],
        *,
        tp_group: dist.ProcessGroup | None,
        max_positions: int,
        ep_size: int = 1,
        scales: Mapping[str, Scales] | None = None,
        operations: Operations | None = None,
        exact: bool = False,
        adapters: FindAdapters | None = None,
    ) -> None:
        find = adapters or (lambda name, first, last: None)
        self._arch, self._exact = arch, exact
        self.operations = operations or Operations()
        self._weights = weights
        scales = scales or {}
        self._tp_group = tp_group if tp_group is not None and dist.get_world_size(tp_group) > 1 else None
        self._tp_size = 1 if self._tp_group is None else dist.get_world_size(self._tp_group)
        self._tp_rank = 0 if self._tp_group is None else dist.get_rank(self._tp_group)
        self.num_heads = arch.num_heads // self._tp_size
        self.num_kv_heads = max(1, arch.num_kv_heads // self._tp_size) if arch.mla is None else 1
        self.cache_dim = arch.head_dim if arch.mla is None else arch.mla.cache_dim
        self._embed_table = weights["embed"]
        self._first_token = self._tp_rank * self._embed_table.size(0)
        device = self._embed_table.device
        self.dtype = compute_dtype(self._embed_table.dtype, device, exact=exact)
        everywhere, windowed = rotary_kinds(arch)
        self._heads = self._local_heads = self._rotary_heads(everywhere, max_positions, device)
        if windowed is not everywhere:
            self._local_heads = self._rotary_heads(windowed, max_positions, device)
        # transformers rounds the factor to the dtype of the embeddings
        scale = arch.embedding_scale
        self._embedding_scale = None if scale is None else float(torch.tensor(scale, dtype=self.dtype))
        self._moe_index = {layer: index for index, layer in enumerate(arch.moe_layers)}
        self._experts = self._moe_layers(ep_size, scales, operations, find)
        # a captured step is replayed to warm up, which would advance the states of linear attention
        self.is_capturable = arch.linear_attention is None
        self.is_capturable &= all(experts.is_capturable for experts in self._experts.values())
        self.has_expert_adapters = any(experts.has_adapters for experts in self._experts.values())
        self._linears = {
            name: self._linear(name, weight, scales, find)
            for name, weight in weights.items()
            if weight.dim() == 2
            and (name != "embed" or arch.tie_word_embeddings)
            and name.rpartition(".")[2] not in (*NAMES, _KV_B)
        }
        self._products = self._head_products(scales, find)
        self._head = self._linears["embed" if arch.tie_word_embeddings else "lm_head"]
        self._layers: list[_Layer] = []
        self._final_norm = weights["final_norm"]

    def _moe_layers(
        self, ep_size: int, scales: Mapping[str, Scales], operations: Operations | None, find: FindAdapters
    ) -> dict[int, MoeLayer]:
        """Returns the experts of this rank by layer."""
        moe = self._arch.moe
        if moe is None:
            return {}
        shard = expert_shard(self._tp_size, self._tp_rank, ep_size)
        # the outputs of ranks that share an expert are summed: one of them adds its bias
        own_names = [name for name in NAMES if name != DOWN_BIAS or shard.etp.rank == 0]
        found = {}
        for i in self._arch.moe_layers:
            prefix = f"layers.{i}."
            inside = {name: self._weights[prefix + name] for name in own_names if prefix + name in self._weights}
            scaled = {name: scales[prefix + name] for name in NAMES if prefix + name in scales}
            adapters = partial(_within, find, prefix)
            found[i] = MoeLayer(moe, inside, shard.experts(moe), self.dtype, scaled, operations, adapters)
        return found

    def _head_products(self, scales: Mapping[str, Scales], find: FindAdapters) -> dict[int, HeadProducts]:
        """Returns the products of latent attention's heads by layer."""
        mla, found = self._arch.mla, {}
        if mla is None:
            return {}
        for i in range(self._arch.num_layers):
            name = f"layers.{i}.{_KV_B}"
            weight = self._weights[name]
            if find(name, 0, weight.size(0)) is not None:
                raise UserError(
                    "the native engine does not add low-rank adapters of kv_b_proj to the products of latent "
                    "attention. Set actor.lora.merge=true, or name other modules in actor.lora.target_modules."
                )
            compiled = self.operations.are_compiled
            found[i] = HeadProducts(weight, mla, self.dtype, scales.get(name), compiled=compiled)
        return found

    def _rotary_heads(self, arch: ArchSpec, max_positions: int, device: torch.device) -> Heads:
        cos, sin = rotary_tables(arch, max_positions, self.dtype, device)
        return Heads(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            eps=arch.rms_norm_eps,
            cos=cos,
            sin=sin,
            norm_offset=arch.norm_offset,
        )

    def _linear(self, name: str, weight: Tensor, scales: Mapping[str, Scales], find: FindAdapters) -> Linear:
        return Linear(
            weight,
            None if name.endswith(".o") and self._tp_rank else self._weights.get(f"{name}_bias"),  # outputs are summed
            self.dtype,
            scales.get(name),
            exact=self._exact,
            compiled=self.operations.are_compiled,
            adapters=find(name, 0, weight.size(0)),
        )

    @property
    def reads(self) -> list[Tensor]:
        """Tensors that a forward reads, except its arguments and the cache; complete after `refresh`."""
        norms = [x for each in self._layers for x in (each.input_norm, each.post_norm, *(each.out_norms or ()))]
        for mixer in (each.mixer for each in self._layers):
            if isinstance(mixer, DeltaNetLayer):
                norms += mixer.reads
            else:
                norms += [*mixer.heads.norms, *([] if mixer.sinks is None else [mixer.sinks])]
        tables = [table for heads in (self._heads, self._local_heads) for table in (heads.cos, heads.sin)]
        parts = [tensor for part in self._parts() for tensor in part.reads]
        return [self._embed_table, self._final_norm, *tables, *norms, *parts]

    @property
    def copied(self) -> list[Linear | HeadProducts]:
        """Products that need a copy of their weight in another dtype."""
        experts = [linear for part in self._experts.values() for linear in part.linears]
        products: list[Linear | HeadProducts] = [*self._linears.values(), *experts, *self._products.values()]
        return [product for product in products if product.copy is not None]

    def later_bytes(self, num_tokens: int) -> int:
        """Returns the bytes allocated after the stored weights: copies, and the experts' workspace for `num_tokens`."""
        copies = sum(part.copy_bytes for part in self._parts())
        return copies + max((part.workspace_bytes(num_tokens) for part in self._experts.values()), default=0)

    def refresh(self) -> None:
        """Updates everything derived from the stored weights; follows each weight update."""
        for part in self._parts():
            part.refresh()
        vectors = {name: weight.to(self.dtype) for name, weight in self._weights.items() if weight.dim() == 1}
        self._final_norm = vectors["final_norm"]
        self._layers = [
            _Layer(
                input_norm=vectors[f"layers.{i}.input_norm"],
                mixer=self._linear_attention(i, vectors)
                if i in self._arch.linear_layers
                else self._softmax_attention(i, vectors),
                post_norm=vectors[f"layers.{i}.post_norm"],
                mlp=self._experts[i]
                if i in self._experts
                else Mlp(
                    self._linears[f"layers.{i}.gate_up"],
                    self._linears[f"layers.{i}.down"],
                    self.operations,
                    self._arch.activation,
                ),
                out_norms=(vectors[f"layers.{i}.attention_out_norm"], vectors[f"layers.{i}.mlp_out_norm"])
                if self._arch.post_norms
                else None,
            )
            for i in range(self._arch.num_layers)
        ]

    def _softmax_attention(self, i: int, vectors: Mapping[str, Tensor]) -> _SoftmaxAttention:
        return _SoftmaxAttention(
            index=self._arch.softmax_layers.index(i),
            heads=self._attention_heads(i, vectors),
            sinks=self._weights[f"layers.{i}.sinks"].float() if self._arch.attention_sinks else None,
            o=self._linears[f"layers.{i}.o"],
            is_windowed=i in self._arch.windowed_layers,
        )

    def _attention_heads(self, layer: int, vectors: Mapping[str, Tensor]) -> FusedHeads | LatentHeads:
        """Returns the projections of a layer; `vectors` has the weights of its norms."""
        mla, linears, prefix = self._arch.mla, self._linears, f"layers.{layer}."
        if mla is None:
            norms = None
            if f"{prefix}q_norm" in vectors:
                norms = vectors[f"{prefix}q_norm"], vectors[f"{prefix}k_norm"]
            gates = self.num_heads if self._arch.output_gate else 0
            return FusedHeads(linears[f"{prefix}qkv"], norms, self._arch.head_dim, gates)
        has_latent = mla.q_lora_rank is not None
        return LatentHeads(
            mla=mla,
            operations=self.operations,
            q_a=(linears[f"{prefix}q_a"], vectors[f"{prefix}q_a_norm"]) if has_latent else None,
            q=linears[f"{prefix}q_b" if has_latent else f"{prefix}q"],
            kv_a=linears[f"{prefix}kv_a"],
            kv_norm=vectors[f"{prefix}kv_a_norm"],
            products=self._products[layer],
        )

    def _linear_attention(self, i: int, vectors: Mapping[str, Tensor]) -> DeltaNetLayer:
        linear = linear_attention_of(self._arch)
        return DeltaNetLayer(
            index=linear.layers.index(i),
            linear=linear,
            in_proj=self._linears[f"layers.{i}.linear_in"],
            conv=self._weights[f"layers.{i}.linear_conv"].to(self.dtype),
            decay_log=vectors[f"layers.{i}.linear_a_log"],
            step_bias=vectors[f"layers.{i}.linear_dt_bias"],
            norm=vectors[f"layers.{i}.linear_norm"],
            eps=self._arch.rms_norm_eps,
            o=self._linears[f"layers.{i}.linear_out"],
        )

    def _parts(self) -> list[Linear | MoeLayer | HeadProducts]:
        return [*self._linears.values(), *self._experts.values(), *self._products.values()]

    def free_copies(self) -> None:
        """Frees everything that `refresh` derived; `refresh` must precede the next use."""
        for part in self._parts():
            part.free_copies()

    def release(self) -> None:
        """Drops every weight; the model cannot be used again."""
        self._linears.clear()
        self._experts.clear()
        self._products.clear()
        self._layers.clear()
        del self._head, self._embed_table, self._final_norm
        self._weights = {}

    @torch.inference_mode()
    def forward(
        self,
        tokens_P: Tensor,
        positions_P: Tensor,
        attention: Attention,
        wanted_N: Tensor | None = None,
        routed_PLK: Tensor | None = None,
        states: SequenceStates | None = None,
    ) -> Tensor:
        """Collective over the replica: computes hidden states after the final norm, [P, H], or [N, H] of `wanted_N`.

        Args:
            tokens_P: Token ids, int64.
            positions_P: Position of each token in its sequence, int64.
            attention: Attention of each layer over the cache.
            wanted_N: Indices of tokens whose state is returned; the others skip the last layer's MLP unless its routing
                is recorded. None: all.
            routed_PLK: Output: experts of each token and layer; None: not recorded.
            states: States of the sequences; None: no layer has linear attention.
        """
        norm, eps = partial(self.operations.norm, offset=self._arch.norm_offset), self._arch.rms_norm_eps
        everywhere = windowed = self.operations.rotation(self._heads, positions_P)
        if self._local_heads is not self._heads:
            windowed = self.operations.rotation(self._local_heads, positions_P)
        x_PH, share_PH = self._embed(tokens_P), None
        for i, layer in enumerate(self._layers):
            x_PH, normed_PH = norm(x_PH, layer.input_norm, eps, share_PH)
            if isinstance(layer.mixer, DeltaNetLayer):
                mixed = layer.mixer.mix(normed_PH, states)
            else:
                rotate = windowed if layer.mixer.is_windowed else everywhere
                mixed = self._attend(layer.mixer, normed_PH, rotate, attention)
            if wanted_N is not None and routed_PLK is None and i == len(self._layers) - 1:
                x_PH, mixed = x_PH[wanted_N], mixed[wanted_N]
            added_PH = self._sum(layer.mixer.o(mixed))
            if layer.out_norms is not None:
                _, added_PH = norm(added_PH, layer.out_norms[0], eps)
            x_PH, normed_PH = norm(x_PH, layer.post_norm, eps, added_PH)
            share_PH, chosen_PK = layer.mlp(normed_PH)
            if routed_PLK is not None and chosen_PK is not None:
                routed_PLK[:, self._moe_index[i]] = chosen_PK
            share_PH = self._sum(share_PH)
            if layer.out_norms is not None:
                _, share_PH = norm(share_PH, layer.out_norms[1], eps)
        _, normed_PH = norm(x_PH, self._final_norm, eps, share_PH)
        return normed_PH if wanted_N is None or routed_PLK is None else normed_PH[wanted_N]

    def _attend(self, layer: _SoftmaxAttention, x_PH: Tensor, rotate: Rotation, attention: Attention) -> Tensor:
        """Returns the inputs of the output projection, [P, N x D], or [P, N x V] with latent attention."""
        q_PND, k_PKD, v_PKD, gate = layer.heads(x_PH, rotate)
        mixed = layer.heads.output(attention(layer.index, q_PND, k_PKD, v_PKD, layer.sinks))
        return mixed if gate is None else mixed * gate.sigmoid()

    @torch.inference_mode()
    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Collective over the replica: computes logits of the true vocabulary [N, V], bitwise equal on every rank."""
        local = self._head(hidden_NH)
        if self._tp_group is not None:
            parts = [torch.empty_like(local) for _ in range(self._tp_size)]
            dist.all_gather(parts, local, group=self._tp_group)
            local = torch.cat(parts, 1)
        return local[:, : self._arch.vocab_size]

    def own_work(self, num_rows: int) -> Tensor:
        """Runs this rank's part of a decode step of `num_rows` rows without attention and communication, for timing."""
        group, self._tp_group = self._tp_group, None
        try:
            tokens_P = torch.arange(num_rows, device=self._embed_table.device) % self._embed_table.size(0)
            positions_P = torch.zeros_like(tokens_P)
            return self.logits(self.forward(tokens_P, positions_P, lambda _, q_PND, *__: q_PND.contiguous()))
        finally:
            self._tp_group = group

    def own_attention(self, num_tokens: int, num_slots: int) -> None:
        """Runs the attention of a decode step of `num_tokens` rows over `num_slots` slots each, for timing."""
        dim, device = self.cache_dim, self._embed_table.device
        cache = self.kv_cache(sys.maxsize, [None])
        cache.reserve(num_tokens, num_slots)
        positions_P = torch.full((num_tokens,), num_slots - 1, device=device)
        attention = self.operations.decode_attention(cache, positions_P, num_slots, self.num_heads)
        qkv = torch.zeros(num_tokens, self.num_heads + 2 * self.num_kv_heads, dim, dtype=self.dtype, device=device)
        q_PND, k_PKD, v_PKD = torch.split(qkv, [self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        if cache.keys_only:
            v_PKD = k_PKD
        for _ in range(self._arch.num_layers):
            attention(0, q_PND, k_PKD, v_PKD, None)

    def kv_cache(self, budget_bytes: int, windows: Sequence[int | None] | None = None) -> KVCache:
        """Returns an empty cache for the model, or for layers with softmax attention and these windows."""
        arch, scale, state = self._arch, self._arch.attention_scale, None
        if windows is None:
            windows, state = [arch.window_of(layer) for layer in arch.softmax_layers], state_shape(arch, self._tp_size)
        return KVCache(
            windows=windows,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.cache_dim,
            dtype=self.dtype,
            device=self._embed_table.device,
            budget_bytes=budget_bytes,
            # in latent attention the size of a cached key is not that of a head
            scale=arch.head_dim**-0.5 if scale is None and arch.mla is not None else scale,
            keys_only=arch.mla is not None,
            state=state,
        )

    def _embed(self, tokens_P: Tensor) -> Tensor:
        embedded_PH = self._look_up(tokens_P)
        return embedded_PH if self._embedding_scale is None else embedded_PH * self._embedding_scale

    def _look_up(self, tokens_P: Tensor) -> Tensor:
        table = self._embed_table
        if self._tp_group is None:
            return F.embedding(tokens_P, table).to(self.dtype)
        rows = tokens_P - self._first_token
        elsewhere = (rows < 0) | (rows >= table.size(0))
        found = F.embedding(rows.masked_fill(elsewhere, 0), table).to(self.dtype)
        return self._sum(found.masked_fill_(elsewhere[:, None], 0))

    def _sum(self, partial: Tensor) -> Tensor:
        """Collective over the replica: returns the sum of the ranks' partial results, possibly in place."""
        if self._tp_group is None:
            return partial
        if self._exact:
            return sum_in_rank_order(partial, self._tp_group)
        dist.all_reduce(partial, group=self._tp_group)
        return partial


def _within(find: FindAdapters, prefix: str, name: str, first: int, last: int) -> LinearAdapters | None:
    """Returns the adapters of a layer's tensor."""
    return find(prefix + name, first, last)
