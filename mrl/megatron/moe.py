"""MoE models in Megatron: fields of the transformer config, and the layer spec with mrl's router."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from mrl.config.config import ActorConfig, ParallelConfig
from mrl.megatron.router import LoadBalance, RoutedLayer, Router
from mrl.models.base import ArchSpec, MoeSpec


def moe_config(arch: ArchSpec, parallel: ParallelConfig, actor: ActorConfig, *, te: bool) -> dict[str, Any]:
    """Returns the MoE fields of Megatron's `TransformerConfig`.

    Args:
        arch: Architecture of the model, dense or MoE.
        parallel: Sizes of the expert groups.
        actor: Section with the dispatcher and the router's dtype. Balancing losses are not Megatron's, see `router.py`.
        te: True if a rank's experts are TransformerEngine's grouped module instead of one module each.
    """
    if arch.moe is None:
        return {"moe_token_dispatcher_type": "alltoall"}  # the only one that allows microbatches of different lengths
    shared = arch.moe.shared_intermediate_size
    mixed: dict[str, Any] = {}
    if arch.moe.dense_layers:  # a list makes Megatron write each layer of a checkpoint under a key of its own
        mixed["moe_layer_freq"] = [int(layer in arch.moe_layers) for layer in range(arch.num_layers)]
    return {
        **mixed,
        "num_moe_experts": arch.moe.num_experts,
        "moe_router_topk": arch.moe.top_k,
        "moe_ffn_hidden_size": arch.moe.intermediate_size,
        "moe_router_score_function": arch.moe.score_function,
        # softmax over the chosen logits equals softmax over all, scaled to a sum of 1; for top_k 1 see `Router`
        "moe_router_pre_softmax": not arch.moe.norm_topk_prob or arch.moe.top_k == 1,
        "moe_router_dtype": actor.moe_router_dtype,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": actor.moe_token_dispatcher_type,
        "moe_grouped_gemm": te,
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": shared > 0 and arch.moe.shared_gate,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
    }


def load_balance(arch: ArchSpec, actor: ActorConfig) -> LoadBalance | None:
    """Creates the load balancing that this rank's routers report to; None for a dense model."""
    if arch.moe is None:
        return None
    return LoadBalance(
        num_layers=arch.num_layers,
        num_experts=arch.moe.num_experts,
        top_k=arch.moe.top_k,
        score_function=arch.moe.score_function,
        aux_coeff=actor.moe_aux_loss_coeff if actor.moe_router_load_balancing_type == "aux_loss" else 0.0,
        z_coeff=actor.moe_z_loss_coeff,
    )


def with_router(layer: ModuleSpec, moe: MoeSpec | None, balance: LoadBalance | None, *, te: bool = False) -> ModuleSpec:
    """Returns the layer spec with mrl's router; unchanged for a dense layer. `te`: it is TransformerEngine's spec."""
    if moe is not None and balance is not None:
        layer.module = RoutedLayer
        parts = _submodules(layer.submodules.mlp)
        parts.router = functools.partial(Router, balance=balance, moe=moe)
        if moe.biases and not te:
            _submodules(parts.experts).linear_fc2 = ExpertDown
    return layer


def count_grouped_biases(model: torch.nn.Module) -> None:
    """Marks the biases of TransformerEngine's grouped experts as those of one tensor-parallel rank, like their weights.

    Otherwise the norm of gradients would count only those of the first rank. Ranks never share an expert with a bias.
    """
    for name, parameter in model.named_parameters():
        if ".experts.linear_fc" in name and ".bias" in name:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def _submodules(spec: Any) -> Any:
    """Returns the submodules of a spec: a ModuleSpec in Megatron 0.16 and 0.17, a partial in 0.18 and 0.19."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


class ExpertDown(RowParallelLinear):  # type: ignore[misc]  # megatron.core has no types
    """Down projection of an expert with a bias, which Megatron's MLP adds to the product in place.

    Tensor-parallel ranks have different experts, never parts of one: Megatron would sum their biases' gradients under
    sequence parallelism, and count one rank's in the norm.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bias.sequence_parallel, self.bias.tensor_model_parallel = False, True

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the product and the bias; autograd forbids changes of what Megatron's own layer returns."""
        output, bias = super().forward(input_)
        return output.clone(), bias
