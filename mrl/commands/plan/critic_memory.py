"""Memory of a critic on a rank of a pipeline stage; its terms are computed like an actor's (`memory.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CriticMemory:
    """Memory of a critic, bytes; all 0 if the algorithm has none.

    Attributes:
        staying: Part -> bytes on the device in every phase.
        away: Part -> bytes on the device in the critic's phase only (offloaded otherwise).
        copies: Host memory of the offloaded parts.
        phase: Term -> additional bytes in the critic's phase: values, then its optimizer steps.
        saved: Copies for an asynchronous checkpoint.
        host: Optimizer state that is always in host memory.
    """

    staying: dict[str, int] = field(default_factory=dict)
    away: dict[str, int] = field(default_factory=dict)
    copies: int = 0
    phase: dict[str, int] = field(default_factory=dict)
    saved: int = 0
    host: int = 0
