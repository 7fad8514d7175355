"""Token ids that top-k, top-p or min-p kept, collected while responses grow (`SamplingConfig.return_kept_tokens`).

Stored in host memory until a response finishes: 4 bytes per kept token and 8 bytes per response token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.types import Rollout, SamplingMask


class KeptTokens:
    """Kept token ids of one response."""

    def __init__(self) -> None:
        self._ids = bytearray()
        self._counts = array("i")
        self._log_mass = array("f")

    def add(self, ids: bytes, log_mass: float) -> None:
        """Appends a response token: kept ids as int32 bytes, and log of their probability mass before truncation."""
        self._ids += ids
        self._counts.append(len(ids) // self._counts.itemsize)
        self._log_mass.append(log_mass)

    @property
    def state(self) -> tuple[bytes, list[int], list[float]]:
        """Contents as plain types that can be sent to another rank."""
        return bytes(self._ids), self._counts.tolist(), self._log_mass.tolist()

    @staticmethod
    def of(state: tuple[bytes, list[int], list[float]]) -> KeptTokens:
        """Returns the object with another rank's `state`."""
        found = KeptTokens()
        found._ids, found._counts, found._log_mass = bytearray(state[0]), array("i", state[1]), array("f", state[2])
        return found

    def attach_to(self, rollout: Rollout) -> None:
        """Sets `support` and `log_kept_mass` of the rollout; ids of tokens after its last one are left out.

        Raises:
            RuntimeError: There are fewer entries than response tokens, or a sampled token is not among the kept ones.
        """
        tokens = torch.tensor(rollout.response_ids, dtype=torch.int32)
        if len(self._counts) < tokens.numel():
            raise RuntimeError(f"kept token ids exist for {len(self._counts)} of {tokens.numel()} response tokens")
        counts_R = torch.tensor(self._counts[: tokens.numel()], dtype=torch.int32)
        ids_K = torch.frombuffer(self._ids, dtype=torch.int32)[: int(counts_R.sum())].clone()
        rows_K = torch.arange(tokens.numel()).repeat_interleave(counts_R)
        found_R = torch.zeros(tokens.numel(), dtype=torch.bool)
        found_R[rows_K[ids_K == tokens[rows_K]]] = True
        if not found_R.all():
            place = int((~found_R).nonzero()[0])
            raise RuntimeError(f"response token {place} ({int(tokens[place])}) is not among the kept token ids")
        rollout.kept_tokens = SamplingMask(ids_K, counts_R)
        rollout.log_kept_mass = self._log_mass[: tokens.numel()].tolist()


def add_step(kept_NV: Tensor, log_mass_N: Tensor, responses: Sequence[KeptTokens | None]) -> None:
    """Appends one decode step to the responses of a batch.

    Args:
        kept_NV: Mask of the kept tokens, bool.
        log_mass_N: Log of their probability mass before truncation.
        responses: Response of each row; None: the row's token is discarded.
    """
    ids = kept_NV.nonzero()[:, 1].to(torch.int32).cpu().numpy().tobytes()
    ends = (kept_NV.sum(1).cumsum(0) * torch.int32.itemsize).tolist()
    for response, start, end, mass in zip(responses, [0, *ends], ends, log_mass_N.tolist(), strict=False):
        if response is not None:
            response.add(ids[start:end], mass)
