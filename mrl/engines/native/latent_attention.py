"""Multi-head latent attention over a cache of latent vectors (DeepSeek-V2, arXiv 2405.04434, section 2.1).

A head's key is [W_UK c; r] and its value W_UV c, where c is the latent vector of the token and r the rotated part of
the key, which all heads share. The score of a query [q; p] is then (W_UK^T q) c + p r, and the output W_UV times the
sum of the latent vectors. So the cache has [c; r] of each token, and attention is that of N query heads over this one
key head, whose first L numbers are the values.

Shapes: P packed tokens, H hidden, N heads of this rank, D dimensions of a head that are not rotated, R that are, V of a
value, L size of the latent vector of keys and values, C = L + R.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mrl.engines.native.fp8_scales import Scales
from mrl.engines.native.gemm_autotune import GemmKernel, kernel_for
from mrl.engines.native.packed_linear import Linear, packs
from mrl.engines.native.torch_ops import Operations, Rotation
from mrl.models.base import MlaSpec


class _Packed(NamedTuple):
    """One of the two products of each head, with packed weights."""

    kernel: GemmKernel
    weights: list[Tensor]

    def __call__(self, x_NPI: Tensor) -> list[Tensor]:
        return [self.kernel(x_PI, weight, None) for x_PI, weight in zip(x_NPI, self.weights, strict=True)]

    def pack(self, weights_NOI: Tensor) -> None:
        earlier = self.weights if self.kernel.in_place else []
        self.weights[:] = [
            self.kernel.pack(weight.contiguous(), earlier[i] if earlier else None)
            for i, weight in enumerate(weights_NOI)
        ]


class HeadProducts:
    """Products of each head with W_UK and W_UV, the two parts of its rows of `kv_b`.

    On an x86 CPU each head's product uses a measured kernel with packed weights, so that the bits of a token do not
    depend on the others (`packed_linear`). Elsewhere all heads are one batched product with views of the stored weight.

    Args:
        weight_OL: Stored weight of the rank, [N x (D + V), L]: per head the rows of W_UK, then those of W_UV; `refresh`
            follows an update.
        mla: Sizes of the latent attention.
        dtype: Dtype of the products.
        scales: Scales of a weight stored in FP8.
        compiled: Allow the compiled kernel.
    """

    def __init__(
        self, weight_OL: Tensor, mla: MlaSpec, dtype: torch.dtype, scales: Scales | None = None, *, compiled: bool
    ) -> None:
        self._stored, self._mla, self._dtype, self._scales = weight_OL, mla, dtype, scales
        self._weight = weight_OL
        self._copy: Tensor | None = None
        self._queries: _Packed | None = None
        self._values: _Packed | None = None
        if packs(weight_OL.device):
            nope, value, latent = mla.qk_nope_head_dim, mla.v_head_dim, mla.kv_lora_rank
            self._queries = _Packed(kernel_for((latent, nope), dtype, compiled=compiled), [])
            self._values = _Packed(kernel_for((value, latent), dtype, compiled=compiled), [])

    @property
    def copy(self) -> tuple[torch.Size, torch.dtype] | None:
        """Shape and dtype of the weight's copy in another dtype, which `copy_into` can place; None: no copy."""
        converted = self._queries is None and self._stored.dtype != self._dtype
        return (self._stored.shape, self._dtype) if converted else None

    def copy_into(self, memory: Tensor) -> None:
        """Makes `refresh` write the copy of the weight to `memory`, so that captured graphs stay valid."""
        self._copy = memory

    @property
    def reads(self) -> list[Tensor]:
        """Tensors that a product reads."""
        packed = [weight for product in (self._queries, self._values) if product for weight in product.weights]
        return packed or [self._weight]

    @property
    def copy_bytes(self) -> int:
        """Bytes that `refresh` allocates in addition to the stored weight."""
        copies = self._stored.dtype != self._dtype or self._queries is not None
        return self._stored.numel() * self._dtype.itemsize if copies else 0

    def refresh(self) -> None:
        """Updates the copies from the stored values."""
        if self._scales is not None:
            self._weight = self._scales.weight(self._stored, self._copy, self._dtype)
        elif self._copy is not None:
            self._weight = self._copy.copy_(self._stored)
        else:
            self._weight = self._stored.to(self._dtype)
        if self._queries is not None and self._values is not None:
            self._queries.pack(self._keys_NDL.mT)
            self._values.pack(self._values_NVL)
            self._weight = self._stored  # a converted copy is not read again

    def free_copies(self) -> None:
        """Frees the copies that `refresh` made."""
        self._weight = self._stored
        for product in (self._queries, self._values):
            if product is not None:
                product.weights.clear()

    def absorb(self, q_PND: Tensor, out_PNL: Tensor) -> None:
        """Writes W_UK^T q of each head."""
        q_NPD = q_PND.transpose(0, 1)
        if self._queries is None:
            out_PNL.copy_(torch.bmm(q_NPD, self._keys_NDL).transpose(0, 1))
            return
        for head, product_PL in enumerate(self._queries(q_NPD.contiguous())):
            out_PNL[:, head] = product_PL

    def values(self, mixed_PNL: Tensor) -> Tensor:
        """Returns W_UV c of each head [P, N x V], of sums c of latent vectors."""
        mixed_NPL = mixed_PNL.transpose(0, 1)
        if self._values is None:
            return torch.bmm(mixed_NPL, self._values_NVL.mT).transpose(0, 1).flatten(1)
        return torch.cat(self._values(mixed_NPL.contiguous()), 1)

    @property
    def _keys_NDL(self) -> Tensor:
        return self._by_head[:, : self._mla.qk_nope_head_dim]

    @property
    def _values_NVL(self) -> Tensor:
        return self._by_head[:, self._mla.qk_nope_head_dim :]

    @property
    def _by_head(self) -> Tensor:
        return self._weight.view(-1, self._mla.qk_nope_head_dim + self._mla.v_head_dim, self._weight.size(1))


@dataclass(frozen=True)
class LatentHeads:
    """Projections of one layer.

    Attributes:
        mla: Sizes of the latent attention.
        operations: Elementwise operations.
        q_a: Product of the hidden state that gives the latent vector of queries, and weight of its norm; None: queries
            are a product of the hidden state.
        q: Product that gives queries.
        kv_a: Product that gives [latent vector; shared part of the key before rotation].
        kv_norm: Weight of the latent vector's norm.
        products: Products of each head with its part of `kv_b`.
    """

    mla: MlaSpec
    operations: Operations
    q_a: tuple[Linear, Tensor] | None
    q: Linear
    kv_a: Linear
    kv_norm: Tensor
    products: HeadProducts

    @property
    def norms(self) -> list[Tensor]:
        """Weights of the norms."""
        return [self.kv_norm] if self.q_a is None else [self.q_a[1], self.kv_norm]

    def __call__(self, x_PH: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor, Tensor, None]:
        """Returns queries [P, N, C], keys [P, 1, C], the same keys as values, and None for output gates."""
        mla = self.mla
        q_input = x_PH if self.q_a is None else self._norm(self.q_a[0](x_PH), self.q_a[1])
        q = self.q(q_input).view(x_PH.size(0), -1, mla.qk_head_dim)
        latent_PL, key_PR = torch.split(self.kv_a(x_PH), [mla.kv_lora_rank, mla.qk_rope_head_dim], 1)
        q_PND, turned_PNR = torch.split(q, [mla.qk_nope_head_dim, mla.qk_rope_head_dim], 2)
        key_P1R = key_PR[:, None]
        turned = torch.cat([turned_PNR, key_P1R, key_P1R], 1)  # a rotation expects values after the keys
        # `rotate` turns two halves; scores do not depend on the order of the rotated dimensions
        halves = turned.view(*turned.shape[:2], -1, 2).transpose(2, 3).flatten(2)
        turned_PNR, key_P1R, _ = rotate(halves, None)
        num_heads = q_PND.size(1)
        out = x_PH.new_empty(x_PH.size(0), num_heads + 1, mla.cache_dim)  # compiled attention reads one tensor
        self.products.absorb(q_PND, out[:, :num_heads, : mla.kv_lora_rank])
        out[:, :num_heads, mla.kv_lora_rank :] = turned_PNR
        out[:, num_heads, : mla.kv_lora_rank] = self._norm(latent_PL.contiguous(), self.kv_norm)
        out[:, num_heads:, mla.kv_lora_rank :] = key_P1R
        keys = out[:, num_heads:]
        return out[:, :num_heads], keys, keys, None

    def output(self, attended_PNC: Tensor) -> Tensor:
        """Returns the heads' values [P, N x V]."""
        return self.products.values(attended_PNC[..., : self.mla.kv_lora_rank])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.operations.norm(x, weight, self.mla.norm_eps)[1]
