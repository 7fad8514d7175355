"""The router of a mixture-of-experts layer: Megatron's top-k, told which experts to replay, measured and balanced.

Owns what a microbatch tells the routers (`Routing`), how it reaches them (`RoutedLayer`), and the losses and measures
of the load (`LoadBalance`). Which experts exist where, and how tokens get there, is Megatron's.

Megatron's own balancing losses count each microbatch by its tokens and are divided by the step's tokens later, which
mrl's losses are not; they also count filling, and a token that several sequences share only once. Here each microbatch
has its part of the global minibatch, so that a loss is the mean over the minibatch's tokens at every layout.

Shapes: D tokens that are computed for a microbatch, n of them on this rank, L layers, E experts, K
chosen ones.
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


@dataclass
class Routing:
    """What the routers must know of a microbatch.

    Attributes:
        copies_D: How many tokens of the batch each stands for in losses and measures; 0 for filling, fp32.
        layers: Of this rank's pipeline stage.
        experts_DLK: The experts to go to in each of `layers`, integers; -1 where the router chooses. None: it always
            does.
        chosen_nLK: Receives the experts that the tokens on this rank go to, most likely first. None: they are not kept.
    """

    copies_D: Tensor
    layers: Sequence[int]
    experts_DLK: Tensor | None = None
    chosen_nLK: Tensor | None = None

    def select(self, rows: Tensor) -> Routing:
        """The routing of some of the tokens."""
        return Routing(self.copies_D[rows], self.layers, None if self.experts_DLK is None else self.experts_DLK[rows])

    def to(self, device: torch.device) -> Routing:
        """The same on another device."""
        experts = None if self.experts_DLK is None else self.experts_DLK.to(device)
        return Routing(self.copies_D.to(device), self.layers, experts)


def routing_of(
    row_I: Tensor, count: int, routed_experts_I: Tensor | None, layers: Sequence[int], *, num_experts: int
) -> Routing:
    """The routing of packed sequences, on the CPU.

    Args:
        row_I: For each packed input the computed token that stands for it.
        count: Computed tokens, filling included.
        routed_experts_I: The choice to replay for each packed input, [I, L, K], -1 where there is none; on the CPU.
            None: nothing is replayed.
        layers: Of this rank's pipeline stage, as in `routed_experts_I`.
        num_experts: E.

    Raises:
        RuntimeError: A choice is no expert, or names one twice, or there are other layers.
    """
    copies = torch.bincount(row_I, minlength=count).float()
    if routed_experts_I is None:
        return Routing(copies, layers)
    chosen = routed_experts_I
    if chosen.size(1) != len(layers):
        raise RuntimeError(f"routed experts are of {chosen.size(1)} layers; this pipeline stage has {len(layers)}")
    _check_choices(chosen, num_experts)
    experts = chosen.new_full((count, *chosen.shape[1:]), -1)
    # sequences that share an input agree on it but for rounding
    known = chosen.flatten(1).min(1).values >= 0
    experts[row_I[known]] = chosen[known]
    return Routing(copies, layers, experts)


def _check_choices(chosen: Tensor, num_experts: int) -> None:
    if chosen.numel() and not (int(chosen.min()) >= -1 and int(chosen.max()) < num_experts):
        raise RuntimeError(
            f"routed experts lie in [{int(chosen.min())}, {int(chosen.max())}]; the model has experts 0 to "
            f"{num_experts - 1}, and -1 stands for none"
        )
    top_k = chosen.size(-1)
    for step in range(1, top_k):
        first, second = chosen[..., step:], chosen[..., : top_k - step]
        if bool(((first == second) & (first >= 0)).any()):
            raise RuntimeError("routed experts name an expert twice for one token and layer")


class LoadBalance:
    """Losses that balance the experts, and what is measured of the routing; one for all routers of an actor's rank."""

    def __init__(self, *, num_layers: int, num_experts: int, top_k: int, aux_coeff: float, z_coeff: float) -> None:
        """Nothing measured yet.

        Args:
            num_layers: L, of the whole model.
            num_experts: E.
            top_k: K.
            aux_coeff: Weight of the load-balancing loss; 0: off.
            z_coeff: Weight of the z-loss; 0: off.
        """
        self._num_experts, self._top_k = num_experts, top_k
        self._aux_coeff, self._z_coeff = aux_coeff, z_coeff
        self._minibatch_tokens = 1
        # of each layer: tokens of each expert, tokens, sum of entropies, auxiliary loss, z-loss
        self._sums_LM = torch.zeros(num_layers, num_experts + 4, dtype=torch.float64)
        self._replayed_2 = torch.zeros(2, dtype=torch.float64)
        self._has_losses = aux_coeff > 0 or z_coeff > 0

    def start(self, routings: Iterable[Routing | None], dp_group: dist.ProcessGroup) -> None:
        """Collective over data- and context-parallel: begins an update with these microbatches."""
        self._sums_LM.zero_()
        self._replayed_2.zero_()
        if self._has_losses:
            tokens = torch.tensor(sum(int(routing.copies_D.sum()) for routing in routings if routing is not None))
            dist.all_reduce(tokens, group=dp_group)
            self._minibatch_tokens = max(1, int(tokens))

    def attach(
        self, probs_nE: Tensor, chosen_nE: Tensor, logits_nE: Tensor, copies_n: Tensor, *, layer: int, group: Any
    ) -> Tensor:
        """Measures one layer's routing of one microbatch, and adds the losses to what `probs_nE` will have as gradient.

        Args:
            probs_nE: Weights of the chosen experts, 0 elsewhere.
            chosen_nE: Which ones, bool.
            logits_nE: The router's.
            copies_n: As in `Routing`.
            layer: Index in the whole model.
            group: The ranks that hold the microbatch's other tokens.

        Returns:
            `probs_nE`, its values unchanged.
        """
        with torch.set_grad_enabled(self._has_losses):
            log_probs_nE = logits_nE.float().log_softmax(-1)
            softmax_nE = log_probs_nE.exp()
        with torch.no_grad():
            load_E = (chosen_nE * copies_n[:, None]).sum(0).double()
            entropy = -(copies_n[:, None] * softmax_nE * log_probs_nE).sum().double()
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
        mass_E = (softmax_nE * copies_n[:, None]).sum(0)
        aux = (mass_E * load_E).sum() * self._num_experts / (self._top_k * tokens * self._minibatch_tokens)
        z = (logits_nE.float().logsumexp(-1).square() * copies_n).sum() / self._minibatch_tokens
        self._sums_LM[layer, self._num_experts + 2 :] += torch.stack([aux.detach().double(), z.detach().double()])
        weighted: Tensor = MoEAuxLossAutoScaler.apply(probs_nE, self._aux_coeff * aux + self._z_coeff * z)
        return weighted

    def compare(self, given_nK: Tensor, own_nK: Tensor, copies_n: Tensor) -> None:
        """Measures how many of the replayed experts one layer's router would not have chosen.

        Args:
            given_nK: The replayed ones, -1 where the router chose.
            own_nK: The router's.
            copies_n: As in `Routing`.
        """
        known_nK = given_nK >= 0
        changed_nK = known_nK & ~(given_nK[:, :, None] == own_nK[:, None, :]).any(-1)
        counts = [(which * copies_n[:, None]).sum().double() for which in (known_nK, changed_nK)]
        self._replayed_2 = self._replayed_2.to(given_nK.device) + torch.stack(counts)

    def metrics(self) -> dict[str, float]:
        """Collective over the job: measures since `start`.

        Returns:
            `actor/moe_load_max_over_mean` (tokens of the busiest expert over the mean expert's: mean over layers, and
            `.../worst` the largest), `actor/moe_router_entropy` (nats, mean over tokens and layers), where experts are
            replayed `actor/moe_replay_changed_frac` (the part of them that the router would not have chosen), and
            where the losses are on `actor/moe_aux_loss` and `actor/moe_z_loss` (before their weights, mean over
            layers).
        """
        sums = torch.cat([self._sums_LM.cpu().flatten(), self._replayed_2.cpu()])
        dist.all_reduce(sums)
        sums_LM, (replayed, changed) = sums[:-2].view_as(self._sums_LM), sums[-2:].tolist()
        load_LE, (tokens_L, entropy_L, aux_L, z_L) = sums_LM[:, :-4], sums_LM[:, -4:].unbind(1)
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


class _Choice:
    """Where Megatron's top-k chooses experts: its `router_replay`. It asks for `get_replay_topk`.

    Megatron's own `RouterReplay` holds one microbatch's experts for each layer, in lists that its user must fill in
    the order of the pipeline's forwards and backwards, and knows no token without a choice. Here they come with the
    microbatch, so that any schedule and any recomputation finds its own.

    Attributes:
        given_nK: Experts to go to, -1 where the router chooses; None: it always does.
        own_nK: What the router chose at last.
        chosen_nK: Where the tokens went.
    """

    own_nK: Tensor
    chosen_nK: Tensor

    def __init__(self) -> None:
        self.given_nK: Tensor | None = None

    def get_replay_topk(
        self, scores_nE: Tensor, top_k: int, num_groups: int | None, group_topk: int | None, own: Any
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices of the chosen experts: the given ones, else the `top_k` largest."""
        scores_nK, chosen_nK = own(scores_nE, top_k, num_groups, group_topk)
        self.own_nK = chosen_nK
        if self.given_nK is not None:
            chosen_nK = torch.where(self.given_nK >= 0, self.given_nK, chosen_nK)
            scores_nK = scores_nE.gather(1, chosen_nK)
        self.chosen_nK = chosen_nK
        return scores_nK, chosen_nK


class Router(TopKRouter):  # type: ignore[misc]  # megatron.core has no types
    """Megatron's router, which replays the experts of `routing` and reports to a `LoadBalance`.

    The weights of replayed experts are those that this router gives to them, so that it learns as ever. Where a token
    goes to one expert and its weight is scaled to 1, Megatron has no setting for it: that is done here, and the router
    learns from the balancing losses alone, as in transformers.
    """

    def __init__(self, config: Any, pg_collection: Any = None, *, balance: LoadBalance, scale_to_one: bool) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.balance = balance
        self.scale_to_one = scale_to_one
        self.routing_plan: Routing | None = None
        self.router_replay = _Choice()

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As Megatron's: the weights of the chosen experts and which ones they are, [n, E] each."""
        plan = self.routing_plan
        if plan is None:
            raise RuntimeError("a router ran without a Routing: the layer was not given PackedSequences with one")
        layer, given, choice = self.layer_number - 1, plan.experts_DLK, self.router_replay
        if given is not None:
            given = self._own(given[:, plan.layers.index(layer)]).long()
        choice.given_nK = given
        probs, chosen = super().routing(logits)
        if plan.chosen_nLK is not None:
            plan.chosen_nLK[:, plan.layers.index(layer)] = choice.chosen_nK.to(plan.chosen_nLK.dtype)
        if self.scale_to_one:
            probs = probs / probs.sum(-1, keepdim=True)
        if self.training and torch.is_grad_enabled():  # recomputation runs twice, once with gradients
            copies = self._own(plan.copies_D)
            if given is not None:
                self.balance.compare(given, choice.own_nK, copies)
            logits_nE = logits.view(-1, logits.size(-1))
            probs = self.balance.attach(probs, chosen, logits_nE, copies, layer=layer, group=self.tp_cp_group)
        return probs, chosen

    def _own(self, rows: Tensor) -> Tensor:
        """This rank's part of what is there for every token: under sequence parallelism a run of equal length."""
        if not self.config.sequence_parallel:
            return rows
        each = rows.size(0) // self.tp_group.size()
        return rows.narrow(0, self.tp_group.rank() * each, each)


class RoutedLayer(TransformerLayer):  # type: ignore[misc]
    """A layer that hands the microbatch's `Routing` to its router, again when it is recomputed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's; `packed_seq_params` are `PackedSequences`."""
        self.mlp.router.routing_plan = kwargs["packed_seq_params"].routing
        output = super().forward(*args, **kwargs)
        # the dispatcher keeps tensors of its last forward, with their graph: a cycle that no garbage collector sees
        state = vars(self.mlp.token_dispatcher)
        state.update({name: None for name, kept in state.items() if isinstance(kept, Tensor) and kept.requires_grad})
        return output
