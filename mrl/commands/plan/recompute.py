"""Activation recompute of the actor, from `actor.recompute` or from Megatron's own `recompute_*` fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mrl.config.config import Config
from mrl.models.base import ArchSpec
from mrl.observability.metrics import attention_weights

FIELDS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


@dataclass(frozen=True)
class Recompute:
    """Parts of the forward that the backward computes again.

    Attributes:
        method: Recompute of full layers: "uniform" in groups of `num_layers`, "block" the first `num_layers` of a
            chunk; None: modules only.
        num_layers: Number of layers, see `method`.
        modules: Recomputed modules of every layer, by Megatron's names.
    """

    method: Literal["uniform", "block"] | None = None
    num_layers: int = 1
    modules: frozenset[str] = frozenset()

    def full_layers(self, layers: int) -> int:
        """Returns how many of a chunk's layers are recomputed in full."""
        return {"uniform": layers, "block": min(self.num_layers, layers)}.get(self.method or "", 0)

    def inputs(self, layers: int) -> int:
        """Returns how many layer inputs a chunk keeps for the recompute."""
        return -(-layers // self.num_layers) if self.method == "uniform" else self.full_layers(layers)

    @property
    def layers_at_a_time(self) -> int:
        """Number of layers whose activations are recomputed together."""
        return self.num_layers if self.method == "uniform" else int(self.method == "block")

    def forwards(self, arch: ArchSpec) -> float:
        """Returns the recomputed matrix products as a fraction of a forward pass."""
        if self.method is not None:
            return min(1.0, self.num_layers / arch.num_layers) if self.method == "block" else 1.0
        if not self.modules & {"mlp", "moe"}:
            return 0.0
        width = arch.intermediate_size if arch.moe is None else arch.moe.top_k * arch.moe.intermediate_size
        mlp = 3 * width * arch.hidden_size
        return mlp / (mlp + attention_weights(arch))


def recompute_of(config: Config) -> Recompute:
    """Returns the recompute settings of a run."""
    given = config.megatron.transformer
    granularity = given.get("recompute_granularity")
    if granularity is None:
        granularity = None if config.actor.recompute == "none" else config.actor.recompute
    if granularity == "full":
        return Recompute(given.get("recompute_method") or "uniform", int(given.get("recompute_num_layers") or 1))
    if granularity == "selective":
        modules = given.get("recompute_modules")
        return Recompute(modules=frozenset(["core_attn"] if modules is None else modules))
    return Recompute()
