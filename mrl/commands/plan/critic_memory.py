"""How much memory a critic takes beside the actor on a rank of a pipeline stage.

Owns what stays on the device between its phases, and what its own phase needs besides. Its weights, gradients,
optimizer and activations are counted as an actor's (`memory.py`, `activations.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CriticMemory:
    """Bytes of a critic; nothing of any where the algorithm has none.

    Attributes:
        staying: Part -> bytes that are on the device in every phase.
        away: Part -> bytes that are there in its own phase only.
        copies: Of what is away, in host memory.
        phase: Term -> bytes of its own phase beside these: values, then its optimizer steps.
        saved: Copies that a commit beside the training makes.
        host: Of the optimizer, in host memory all the time.
    """

    staying: dict[str, int] = field(default_factory=dict)
    away: dict[str, int] = field(default_factory=dict)
    copies: int = 0
    phase: dict[str, int] = field(default_factory=dict)
    saved: int = 0
    host: int = 0
