"""The router of an MoE layer: Megatron's top-k with groups, replay of experts, load metrics and balancing losses.

`Routing` is a microbatch's input to the routers, `RoutedLayer` passes it to them, and `LoadBalance` has losses and
metrics. Placement of experts and dispatch of tokens are Megatron's.

Megatron's own balancing losses weigh each microbatch by its tokens and are divided by the step's tokens later, unlike
mrl's losses; they also count padding, and count a token shared by several sequences only once. Here each microbatch is
weighed by its part of the global minibatch, so that a loss is the mean over the minibatch's tokens at every layout.

Shapes: D tokens computed for a microbatch, n of them on this rank, L layers, E experts, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from mrl.models.base import MoeSpec
from mrl.models.kernels.expert_groups import in_best_groups

BIAS = "expert_bias"
"""Megatron's name of the router's buffer that is added to scores where experts are selected."""


@dataclass
class Routing:
    """Input of the routers for a microbatch.

    Attributes:
        token_counts_D: Number of batch tokens that each computed token represents in losses and metrics, fp32; 0 for
            padding.
        layers: Indices of the layers with experts of this rank's pipeline stage.
        experts_DLK: Experts to replay in each of `layers`, integers; -1 where the router chooses. None: it always does.
        chosen_nLK: Buffer that receives the experts of the tokens on this rank, most likely first; None: not recorded.
    """

    token_counts_D: Tensor
    layers: Sequence[int]
    experts_DLK: Tensor | None = None
    chosen_nLK: Tensor | None = None

    def select(self, rows: Tensor) -> Routing:
        """Returns the routing of some of the tokens."""
        return Routing(
            self.token_counts_D[rows], self.layers, None if self.experts_DLK is None else self.experts_DLK[rows]
        )

    def to(self, device: torch.device) -> Routing:
        """Returns the routing on another device."""
        experts = None if self.experts_DLK is None else self.experts_DLK.to(device)
        return Routing(self.token_counts_D.to(device), self.layers, experts)


def packed_routing(
    row_I: Tensor, count: int, routed_experts_I: Tensor | None, layers: Sequence[int], *, num_experts: int
) -> Routing:
    """Builds the routing of packed sequences, on the CPU.

    Args:
        row_I: Computed token that represents each packed input.
        count: Number of computed tokens, padding included.
        routed_experts_I: Experts to replay for each packed input, [I, L, K] on the CPU, -1 where there are none. None:
            no replay.
        layers: Indices of the layers with experts of this rank's pipeline stage, in the order of `routed_experts_I`.
        num_experts: Number of experts, E.

    Raises:
        RuntimeError: An index is no expert, occurs twice for a token, or the number of layers differs.
    """
    copies = torch.bincount(row_I, minlength=count).float()
    if routed_experts_I is None:
        return Routing(copies, layers)
    chosen = routed_experts_I
    if chosen.size(1) != len(layers):
        raise RuntimeError(f"routed experts have {chosen.size(1)} layers, but this pipeline stage has {len(layers)}")
    _check_choices(chosen, num_experts)
    experts = chosen.new_full((count, *chosen.shape[1:]), -1)
    # sequences that share an input have the same experts, up to rounding: any of them will do
    known = (chosen >= 0).flatten(1).all(1)
    experts[row_I[known]] = chosen[known]
    return Routing(copies, layers, experts)


def _check_choices(chosen: Tensor, num_experts: int) -> None:
    if chosen.numel() and not (int(chosen.min()) >= -1 and int(chosen.max()) < num_experts):
        raise RuntimeError(
            f"routed experts are in [{int(chosen.min())}, {int(chosen.max())}], expected 0 to {num_experts - 1}, or -1 "
            "for none"
        )
    top_k = chosen.size(-1)
    for step in range(1, top_k):
        first, second = chosen[..., step:], chosen[..., : top_k - step]
        if bool(((first == second) & (first >= 0)).any()):
            raise RuntimeError("routed experts have an expert twice for one token and layer")


class LoadBalance:
    """Load-balancing losses and routing metrics, shared by all routers of a rank's actor."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_experts: int,
        top_k: int,
        aux_coeff: float,
        z_coeff: float,
        score_function: str = "softmax",
    ) -> None:
        """Sets all measurements to zero.

        Args:
            num_layers: Layers of the full model, L.
            num_experts: Experts per layer, E.
            top_k: Experts per token, K.
            aux_coeff: Weight of the load-balancing loss; 0: off.
            z_coeff: Weight of the z-loss; 0: off.
            score_function: `MoeSpec.score_function`; sigmoid scores count in proportion to their sum.
        """
        self._by_sigmoid = score_function == "sigmoid"
        self._num_experts, self._top_k = num_experts, top_k
        self._aux_coeff, self._z_coeff = aux_coeff, z_coeff
        self._minibatch_tokens = 1
        # per layer: tokens of each expert, tokens, sum of entropies, auxiliary loss, z-loss
        self._sums_LM = torch.zeros(num_layers, num_experts + 4, dtype=torch.float64)
        self._replayed_2 = torch.zeros(2, dtype=torch.float64)
        self._load_LE = torch.zeros(num_layers, num_experts, dtype=torch.float64)
        self._has_losses = aux_coeff > 0 or z_coeff > 0

    def start(self, routings: Iterable[Routing | None], dp_group: dist.ProcessGroup) -> None:
        """Collective over data- and context-parallel: starts an update with these microbatches."""
        self._sums_LM.zero_()
        self._replayed_2.zero_()
        if self._has_losses:
            tokens = torch.tensor(sum(int(routing.token_counts_D.sum()) for routing in routings if routing is not None))
            dist.all_reduce(tokens, group=dp_group)
            self._minibatch_tokens = max(1, int(tokens))

    def attach(
        self, probs_nE: Tensor, chosen_nE: Tensor, logits_nE: Tensor, copies_n: Tensor, *, layer: int, group: Any
    ) -> Tensor:
        """Measures one layer's routing of one microbatch, and attaches the losses' gradients to `probs_nE`.

        Args:
            probs_nE: Weights of the chosen experts, 0 elsewhere.
            chosen_nE: True for the chosen experts.
            logits_nE: Logits of the router.
            copies_n: Number of batch tokens that each token represents, see `Routing`.
            layer: Index in the full model.
            group: Ranks that have the microbatch's other tokens.

        Returns:
            `probs_nE`, its values unchanged.
        """
        with torch.set_grad_enabled(self._has_losses):
            log_scores_nE = logits_nE.float()
            if self._by_sigmoid:
                log_scores_nE = torch.nn.functional.logsigmoid(log_scores_nE)
            log_probs_nE = log_scores_nE.log_softmax(-1)
            probabilities_nE = log_probs_nE.exp()
        with torch.no_grad():
            load_E = (chosen_nE * copies_n[:, None]).sum(0).double()
            entropy = -(copies_n[:, None] * probabilities_nE * log_probs_nE).sum().double()
            tokens = copies_n.sum().double()
            measured = torch.cat([load_E, torch.stack([tokens, entropy])])
            if self._sums_LM.device != measured.device:
                self._sums_LM = self._sums_LM.to(measured.device)
            self._sums_LM[layer, : self._num_experts + 2] += measured
        if not self._has_losses:
            return probs_nE
        counts = torch.cat([load_E, tokens[None]])
        if group.size() > 1:
            dist.all_reduce(counts, group=group)
        load_E, tokens = counts[:-1], counts[-1].clamp(min=1)
        # Switch Transformer (arXiv 2101.03961), equations 4 to 6, times this microbatch's part of the minibatch
        mass_E = (probabilities_nE * copies_n[:, None]).sum(0)
        aux = (mass_E * load_E).sum() * self._num_experts / (self._top_k * tokens * self._minibatch_tokens)
        z = (logits_nE.float().logsumexp(-1).square() * copies_n).sum() / self._minibatch_tokens
        self._sums_LM[layer, self._num_experts + 2 :] += torch.stack([aux.detach().double(), z.detach().double()])
        weighted: Tensor = MoEAuxLossAutoScaler.apply(probs_nE, self._aux_coeff * aux + self._z_coeff * z)
        return weighted

    def load_of(self, layer: int) -> Tensor:
        """Returns the tokens of each expert of a layer, over the job, from the last `metrics`; only ratios matter."""
        return self._load_LE[layer]

    def count_replayed(self, given_nK: Tensor, own_nK: Tensor, copies_n: Tensor) -> None:
        """Counts the replayed experts of one layer, and those that its router would not have chosen.

        Args:
            given_nK: Replayed experts, -1 where the router chose.
            own_nK: Experts that the router chose.
            copies_n: Number of batch tokens that each token represents, see `Routing`.
        """
        known_nK = given_nK >= 0
        changed_nK = known_nK & ~(given_nK[:, :, None] == own_nK[:, None, :]).any(-1)
        counts = [(which * copies_n[:, None]).sum().double() for which in (known_nK, changed_nK)]
        self._replayed_2 = self._replayed_2.to(given_nK.device) + torch.stack(counts)

    def metrics(self) -> dict[str, float]:
        """Collective over the job: returns the metrics since `start`.

        Returns:
            `actor/moe_load_max_over_mean` (tokens of the busiest expert over the mean expert's, mean over layers;
            `.../worst` is the largest layer), `actor/moe_router_entropy` (nats, mean over tokens and layers); if
            experts are replayed `actor/moe_replay_changed_frac` (fraction that the router would not have chosen); and
            for enabled losses `actor/moe_aux_loss` and `actor/moe_z_loss` (before their weights, mean over layers).
        """
        sums = torch.cat([self._sums_LM.cpu().flatten(), self._replayed_2.cpu()])
        dist.all_reduce(sums)
        sums_LM, (replayed, changed) = sums[:-2].view_as(self._sums_LM), sums[-2:].tolist()
        load_LE, (tokens_L, entropy_L, aux_L, z_L) = sums_LM[:, :-4], sums_LM[:, -4:].unbind(1)
        self._load_LE = load_LE
        routed_L = tokens_L > 0
        if bool(routed_L.any()):  # not the layers with a dense MLP
            load_LE, tokens_L, entropy_L, aux_L, z_L = (
                each[routed_L] for each in (load_LE, tokens_L, entropy_L, aux_L, z_L)
            )
        unevenness_L = load_LE.max(1).values / load_LE.mean(1).clamp(min=1e-9)
        metrics = {
            "actor/moe_load_max_over_mean": float(unevenness_L.mean()),
            "actor/moe_load_max_over_mean/worst": float(unevenness_L.max()),
            "actor/moe_router_entropy": float((entropy_L / tokens_L.clamp(min=1)).mean()),
        }
        if replayed:
            metrics["actor/moe_replay_changed_frac"] = changed / replayed
        if self._aux_coeff:
            metrics["actor/moe_aux_loss"] = float(aux_L.mean())
        if self._z_coeff:
            metrics["actor/moe_z_loss"] = float(z_L.mean())
        return metrics


def update_biases(routers: Iterable[Router], rate: float) -> float:
    """Collective over the job: moves the selection biases against the load that `LoadBalance.metrics` summed up.

    Source: Wang et al. 2024 (arXiv 2408.15664), algorithm 1: the sign of the difference to the mean load times a rate.

    Args:
        routers: Routers of this rank that have a bias.
        rate: Change of each bias.

    Returns:
        The largest absolute value of a bias of the model.
    """
    largest = torch.zeros(1)
    for router in routers:
        load_E = router.balance.load_of(router.layer_number - 1).to(router.expert_bias.device)
        router.expert_bias += rate * (load_E.mean() - load_E).sign().float()
        largest = torch.maximum(largest, router.expert_bias.abs().max().cpu())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


class _ExpertSelection:
    """Expert selection with replay, for the `router_replay` hook of Megatron's top-k, which calls `get_replay_topk`.

    Megatron's own `RouterReplay` stores one microbatch's experts per layer, in lists that its user must fill in the
    order of the pipeline's forwards and backwards, and needs a choice for every token. Here they come with the
    microbatch, so any schedule and any recomputation gets the right ones.

    Attributes:
        moe: Sizes and options of the router.
        given_nK: Experts to replay, -1 where the router chooses; None: it always does.
        own_nK: Experts that the router chose in the last call.
        chosen_nK: Experts to which the tokens were routed in the last call.
    """

    own_nK: Tensor
    chosen_nK: Tensor

    def __init__(self, moe: MoeSpec) -> None:
        self.moe = moe
        self.given_nK: Tensor | None = None

    def get_replay_topk(
        self, scores_nE: Tensor, top_k: int, num_groups: int | None, group_topk: int | None, own: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns scores and indices of the experts: replayed ones where given, else the `top_k` largest."""
        scores_nK, chosen_nK = own(in_best_groups(scores_nE, self.moe), top_k, num_groups, group_topk)
        if not torch.is_grad_enabled():  # from 0.18 on Megatron's top-k is not sorted then
            order_nK = scores_nK.argsort(dim=1, descending=True, stable=True)
            scores_nK, chosen_nK = scores_nK.gather(1, order_nK), chosen_nK.gather(1, order_nK)
        self.own_nK = chosen_nK
        if self.given_nK is not None:
            chosen_nK = torch.where(self.given_nK >= 0, self.given_nK, chosen_nK)
            scores_nK = scores_nE.gather(1, chosen_nK)
        self.chosen_nK = chosen_nK
        return scores_nK, chosen_nK


class Router(TopKRouter):  # type: ignore[misc]  # megatron.core has no types
    """Megatron's router, which replays the experts of a `Routing` and reports to a `LoadBalance`.

    The weights of replayed experts are this router's, so that it is trained as usual. What Megatron has no setting for
    is done here: groups as transformers chooses them, weights scaled to 1 with one expert per token (the router then
    learns from the balancing losses only, as in transformers), and sigmoid scores that are not scaled.

    Attributes:
        expert_bias: Bias of the selection, fp32 [E]; a buffer, which no gradient changes. None: the model has none.
    """

    def __init__(
        self,
        config: Any,
        pg_collection: Any = None,
        *,
        balance: LoadBalance,
        moe: MoeSpec,
        is_mtp_layer: bool = False,  # given by 0.17 and later; mrl has no multi-token prediction
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.balance, self.moe = balance, moe
        self.routing_plan: Routing | None = None
        self.router_replay = _ExpertSelection(moe)
        if moe.score_bias:
            delattr(self, BIAS)  # None, as Megatron would allocate its own on a GPU
            self.register_buffer(BIAS, torch.zeros(moe.num_experts, dtype=torch.float32))

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns weights and mask of the chosen experts, [n, E] each, like Megatron's."""
        plan = self.routing_plan
        if plan is None:
            raise RuntimeError("a router has no Routing: its layer was called without PackedSequences.routing")
        layer, replayed, choice = self.layer_number - 1, plan.experts_DLK, self.router_replay
        if replayed is not None:
            replayed = self._local_rows(replayed[:, plan.layers.index(layer)]).long()
        choice.given_nK = replayed
        probs, chosen = super().routing(logits)
        if plan.chosen_nLK is not None:
            plan.chosen_nLK[:, plan.layers.index(layer)] = choice.chosen_nK.to(plan.chosen_nLK.dtype)
        probs = self._scaled(probs, chosen, logits.view(-1, logits.size(-1)))
        if self.training and torch.is_grad_enabled():  # with recomputation, only the second forward has gradients
            copies = self._local_rows(plan.token_counts_D)
            if replayed is not None:
                self.balance.count_replayed(replayed, choice.own_nK, copies)
            logits_nE = logits.view(-1, logits.size(-1))
            probs = self.balance.attach(probs, chosen, logits_nE, copies, layer=layer, group=self.tp_cp_group)
        return probs, chosen

    def _scaled(self, probs: Tensor, chosen: Tensor, logits: Tensor) -> Tensor:
        """Returns the weights of the chosen experts as the model scales them."""
        moe = self.moe
        if moe.norm_topk_prob and moe.top_k == 1:
            probs = probs / probs.sum(-1, keepdim=True)
        elif moe.score_function == "sigmoid" and not moe.norm_topk_prob and moe.top_k > 1:
            probs = probs * (logits.float().sigmoid() * chosen).sum(-1, keepdim=True).to(probs.dtype)
        return probs if moe.scaling_factor == 1 else probs * moe.scaling_factor

    def _local_rows(self, rows: Tensor) -> Tensor:
        """Selects this rank's rows: under sequence parallelism one of equally long parts."""
        if not self.config.sequence_parallel:
            return rows
        each = rows.size(0) // self.tp_group.size()
        return rows.narrow(0, self.tp_group.rank() * each, each)


class RoutedLayer(TransformerLayer):  # type: ignore[misc]
    """A transformer layer that passes the microbatch's `Routing` to its router, also when it is recomputed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs Megatron's layer; `packed_seq_params` must be `PackedSequences`."""
        self.mlp.router.routing_plan = kwargs["packed_seq_params"].routing
        output = super().forward(*args, **kwargs)
        # the dispatcher keeps tensors of its last forward; their graph is a cycle that the garbage collector cannot see
        state = vars(self.mlp.token_dispatcher)
        state.update({name: None for name, kept in state.items() if isinstance(kept, Tensor) and kept.requires_grad})
        return output
