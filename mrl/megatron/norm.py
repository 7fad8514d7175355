"""RMSNorm for Megatron's local layer spec.

Owns the norm only. Megatron's own one without TransformerEngine refuses sequence parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root mean square norm over the last dimension.

    Under sequence parallelism each rank sees its part of the sequence only; the mark on the weight makes Megatron add
    up the ranks' gradients (`finalize_model_grads`).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.shape = (hidden_size,)
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """The normed rows, in the dtype of `x`."""
        return F.rms_norm(x, self.shape, self.weight, self.eps)
