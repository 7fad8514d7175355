"""What the backward of the actor computes again, from `actor.recompute` or from Megatron's own `recompute_*` fields.

Owns the one reading of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mrl.config.config import Config
from mrl.models.base import ArchSpec

FIELDS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


@dataclass(frozen=True)
class Recompute:
    """What is computed again.

    Attributes:
        method: Of whole layers: "uniform" in groups of `num_layers`, "block" the first `num_layers` of a chunk; None:
            modules only.
        num_layers: As above.
        modules: Parts of every layer, by Megatron's names.
    """

    method: Literal["uniform", "block"] | None = None
    num_layers: int = 1
    modules: frozenset[str] = frozenset()

    def whole_layers(self, layers: int) -> int:
        """Of so many layers of a chunk, those of which nothing but the input of their group is kept."""
        return {"uniform": layers, "block": min(self.num_layers, layers)}.get(self.method or "", 0)

    def inputs(self, layers: int) -> int:
        """How many inputs are kept of so many layers of a chunk."""
        return -(-layers // self.num_layers) if self.method == "uniform" else self.whole_layers(layers)

    @property
    def layers_at_a_time(self) -> int:
        """Layers whose activations are there again at a time."""
        return self.num_layers if self.method == "uniform" else int(self.method == "block")

    def forwards(self, arch: ArchSpec) -> float:
        """Operations of a backward's recompute, in forward passes; what is no matrix product counts nothing."""
        if self.method is not None:
            return min(1.0, self.num_layers / arch.num_layers) if self.method == "block" else 1.0
        if not self.modules & {"mlp", "moe"}:
            return 0.0
        width = arch.intermediate_size if arch.moe is None else arch.moe.top_k * arch.moe.intermediate_size
        attention = (2 * arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
        return 3 * width / (3 * width + attention)


def recompute_of(config: Config) -> Recompute:
    """Of a run."""
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
