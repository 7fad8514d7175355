"""Mixture-of-experts layer on one rank of a replica: routing, and the products of this rank's experts or their shards.

Every rank of the replica has all tokens and computes the same routing; it returns its share of the sum.

A token's result does not depend on the other tokens: each expert is one product over its tokens (`packed_linear.py`),
and a token's experts are added in routing order. With few tokens only the weights of the chosen experts are read. On a
GPU with grouped products, bfloat16 experts use these instead: nothing is copied to the host, so decoding can be
captured. CPU tests compare the two paths; the grouped one has not been run on a GPU.

Shapes: P tokens, K experts of a token, E experts, A = P x K assignments, I inner width of an expert's shard, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.engines.native.fp8_scales import Scales
from mrl.engines.native.packed_linear import Linear, LinearAdapters
from mrl.engines.native.torch_ops import Operations
from mrl.models.base import MoeSpec
from mrl.models.kernels.expert_groups import in_best_groups

Activation = Callable[[Tensor], Tensor]
"""Computes the gated activation of [gate; up] columns."""

FindAdapters = Callable[[str, int, int], LinearAdapters | None]

_SHARED = ("shared_gate_up", "shared_down", "shared_gate")
_STACKS = ("experts_gate_up", "experts_down")
_BIAS = "router_bias"
_LOGIT_BIAS = "router_logit_bias"
DOWN_BIAS = "experts_down_bias"
_BIASES = ("experts_gate_up_bias", DOWN_BIAS)
NAMES = ("router", _BIAS, _LOGIT_BIAS, *_STACKS, *_BIASES, *_SHARED)
"""Stored tensors of an MoE layer (`resharding/native.py`)."""

GROUPED_FROM, GROUPED_BELOW = (9, 0), (12, 0)
"""Range of compute capabilities for which torch has one kernel for grouped products."""

GROUPED_MULTIPLE = 8
"""Elements; grouped products need rows of a multiple of 16 bytes."""

MAX_ASSIGNMENTS = 1 << 14
"""Assignments computed at a time; bounds the peak memory."""


class MoeLayer:
    """Computes this rank's share of the layer's experts, including the shared expert.

    Args:
        moe: MoE sizes of the model.
        weights: Stored tensors of the layer, by `NAMES`; `refresh` follows an update.
        held: Experts of this rank.
        dtype: Dtype of the products; routing is float32.
        scales: Scales of the weights stored in FP8, by `NAMES`.
        operations: Elementwise operations; None: PyTorch's.
        adapters: Function (name of a stored tensor, first row, row after the last) -> low-rank adapters of these rows;
            None: there are no adapters. With adapters of experts, each expert is a product of its own.

    Attributes:
        has_adapters: Whether an expert has low-rank adapters.
        is_capturable: Whether a call can be captured in a CUDA graph.
    """

    def __init__(
        self,
        moe: MoeSpec,
        weights: Mapping[str, Tensor],
        held: range,
        dtype: torch.dtype,
        scales: Mapping[str, Scales] | None = None,
        operations: Operations | None = None,
        adapters: FindAdapters | None = None,
    ) -> None:
        operations = operations or Operations()
        find = adapters or (lambda name, first, last: None)
        limit = moe.activation_limit
        self._activate = operations.gate if limit is None else partial(clamped_gate, limit=limit)
        make = partial(Linear, dtype=dtype, compiled=operations.are_compiled)
        self._moe = moe
        self._held = held
        self._dtype = dtype
        scales = scales or {}
        self._stacks = [weights[name].view(len(held), -1, weights[name].size(1)) for name in _STACKS]
        self._router = Linear(weights["router"], weights.get(_LOGIT_BIAS), torch.float32)
        self._bias_E = weights.get(_BIAS)
        self._shared = {
            name: make(weights[name], None, scales=scales.get(name), adapters=find(name, 0, weights[name].size(0)))
            for name in _SHARED
            if name in weights
        }
        rows = {
            name: [(i * len(s), s) for i, s in enumerate(stack)]
            for name, stack in zip(_STACKS, self._stacks, strict=True)
        }
        of_experts = {name: [find(name, at, at + len(s)) for at, s in parts] for name, parts in rows.items()}
        self.has_adapters = any(any(found) for found in of_experts.values())
        device = weights["router"].device
        self.is_capturable = (
            device.type == "cuda"
            and dtype == self._stacks[0].dtype == torch.bfloat16
            and has_grouped_products(torch.cuda.get_device_capability(device))
            and all(stack.size(2) % GROUPED_MULTIPLE == 0 for stack in self._stacks)
            and not (self.has_adapters or moe.biases)
        )
        self._gate_up, self._down = (
            [] if self.is_capturable else _linears(stack, weights.get(bias), scales.get(name), of_experts[name], make)
            for name, bias, stack in zip(_STACKS, _BIASES, self._stacks, strict=True)
        )

    @property
    def linears(self) -> list[Linear]:
        """Ungrouped products."""
        return [self._router, *self._gate_up, *self._down, *self._shared.values()]

    @property
    def reads(self) -> list[Tensor]:
        """Tensors that a call reads."""
        biases = [] if self._bias_E is None else [self._bias_E]
        return [*biases, *self._stacks, *(tensor for linear in self.linears for tensor in linear.reads)]

    @property
    def copy_bytes(self) -> int:
        """Bytes that `refresh` allocates in addition to the stored weights."""
        return sum(linear.copy_bytes for linear in self.linears)

    def workspace_bytes(self, num_tokens: int) -> int:
        """Returns the approximate peak memory of a call on so many tokens, bytes."""
        _, hidden, inner = self._stacks[1].shape
        return work_bytes(num_tokens * self._moe.top_k, hidden, inner)

    def refresh(self) -> None:
        """Updates copies of the stored weights."""
        for linear in self.linears:
            linear.refresh()

    def free_copies(self) -> None:
        """Frees the copies that `refresh` made."""
        for linear in self.linears:
            linear.free_copies()

    def __call__(self, x_PH: Tensor) -> tuple[Tensor, Tensor]:
        """Returns this rank's share [P, H], to be summed over the replica, and the chosen experts [P, K], int64."""
        shares_PK, chosen_PK = self.route(x_PH)
        step = max(1, MAX_ASSIGNMENTS // self._moe.top_k)
        parts = zip(*(torch.split(x, step) for x in (x_PH, shares_PK, chosen_PK)), strict=True)
        outputs = [self._mix(*part) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), chosen_PK

    def route(self, x_PH: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights (fp32 [P, K]) and indices (int64 [P, K]) of each token's experts, most likely first."""
        moe, logits_PE = self._moe, self._router(x_PH.float())
        scores_PE: Tensor = _sigmoid(logits_PE) if moe.score_function == "sigmoid" else logits_PE.softmax(-1)
        selection_PE = scores_PE if self._bias_E is None else scores_PE + self._bias_E
        chosen_PK = in_best_groups(selection_PE, moe).topk(moe.top_k, -1).indices
        shares_PK = scores_PE.gather(1, chosen_PK)
        if moe.norm_topk_prob:
            shares_PK = shares_PK / shares_PK.sum(-1, keepdim=True)
        return shares_PK if moe.scaling_factor == 1 else shares_PK * moe.scaling_factor, chosen_PK

    def _mix(self, x_PH: Tensor, shares_PK: Tensor, chosen_PK: Tensor) -> Tensor:
        if self.is_capturable:
            outputs_AH = grouped(x_PH, chosen_PK, self._held, *self._stacks)
        else:
            outputs_AH = one_by_one(x_PH, chosen_PK, self._held, self._gate_up, self._down, self._activate)
        mixed = outputs_AH.view(*chosen_PK.shape, x_PH.size(1)).mul(shares_PK[..., None]).sum(1).to(self._dtype)
        if self._shared:
            shared = self._shared["shared_down"](self._activate(self._shared["shared_gate_up"](x_PH)))
            if self._moe.shared_gate:
                shared = shared.mul_(_sigmoid(self._shared["shared_gate"](x_PH)))
            mixed += shared
        return mixed


def _linears(
    stack: Tensor,
    bias: Tensor | None,
    scales: Scales | None,
    adapters: Sequence[LinearAdapters | None],
    make: Callable[..., Linear],
) -> list[Linear]:
    """Creates one product per expert."""
    parts = [None] * len(stack) if scales is None else scales.of_rows(len(stack))
    biases = [None] * len(stack) if bias is None else bias.view(len(stack), -1)
    of_experts = zip(stack, biases, parts, adapters, strict=True)
    return [make(weight, own_bias, scales=part, adapters=own) for weight, own_bias, part, own in of_experts]


def clamped_gate(gate_up: Tensor, *, limit: float) -> Tensor:
    """Returns the activation of `MoeSpec.activation_limit` of [gate; up] columns."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * _sigmoid(1.702 * gate))


def work_bytes(num_assignments: int, hidden: int, inner: int) -> int:
    """Returns the approximate peak memory of inputs, both projections and outputs of a part of the assignments, bytes.

    Args:
        num_assignments: Tokens x experts of a token.
        hidden: H.
        inner: I.
    """
    return min(num_assignments, MAX_ASSIGNMENTS) * (4 * hidden + 5 * inner) * torch.float32.itemsize


def has_grouped_products(capability: tuple[int, int]) -> bool:
    """Returns whether torch has one kernel for all experts' products on a device of this compute capability."""
    return hasattr(F, "grouped_mm") and GROUPED_FROM <= capability < GROUPED_BELOW  # from torch 2.10 on


def one_by_one(
    x_PH: Tensor, chosen_PK: Tensor, held: range, gate_up: list[Linear], down: list[Linear], activate: Activation
) -> Tensor:
    """Returns the chosen experts' outputs [A, H], zero for experts of other ranks, with one product per expert."""
    order_A = chosen_PK.flatten().sort(stable=True).indices
    counts = torch.bincount(chosen_PK.flatten(), minlength=held.stop)[: held.stop].tolist()
    first = sum(counts[: held.start])
    counts = counts[held.start :]
    order_A = order_A[first : first + sum(counts)]
    present = [(expert, count) for expert, count in enumerate(counts) if count]
    outputs_AH = x_PH.new_zeros(chosen_PK.numel(), x_PH.size(1))
    if present:
        experts, sizes = [expert for expert, _ in present], [count for _, count in present]
        parts = torch.split(x_PH[order_A // chosen_PK.size(1)], sizes)
        inner_AI = activate(torch.cat([gate_up[expert](part) for expert, part in zip(experts, parts, strict=True)]))
        parts = torch.split(inner_AI, sizes)
        outputs_AH[order_A] = torch.cat([down[expert](part) for expert, part in zip(experts, parts, strict=True)])
    return outputs_AH


def grouped(x_PH: Tensor, chosen_PK: Tensor, held: range, gate_up_EJH: Tensor, down_EHI: Tensor) -> Tensor:
    """Does the same as `one_by_one` in two grouped products of fixed shape; other ranks' experts are sorted last."""
    ours_A = chosen_PK.flatten() - held.start
    ours_A = torch.where((ours_A < 0) | (ours_A >= len(held)), len(held), ours_A)
    order_A = ours_A.sort(stable=True).indices
    experts = torch.arange(len(held), device=x_PH.device)
    ends_E = (ours_A[:, None] <= experts).sum(0, dtype=torch.int32)
    inner_AI = Operations().gate(F.grouped_mm(x_PH[order_A // chosen_PK.size(1)], gate_up_EJH.mT, offs=ends_E))
    sorted_AH = F.grouped_mm(inner_AI, down_EHI.mT, offs=ends_E)
    outputs_AH = torch.empty_like(sorted_AH)
    outputs_AH[order_A] = sorted_AH
    return outputs_AH.masked_fill_((ours_A == len(held))[:, None], 0)  # rows behind the last group are not computed


def _sigmoid(x: Tensor) -> Tensor:
    """Computes each element alone: torch's own sigmoid rounds differently at the end of a tensor than inside it."""
    return torch.stack([x, torch.zeros_like(x)], -1).softmax(-1)[..., 0]
