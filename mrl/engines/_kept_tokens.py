"""What truncation kept of responses while they grow, for `SamplingConfig.with_support`.

Owns how it is stored until a response is whole: 4 bytes for each kept token and 8 for each response token, in host
memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.types import Rollout, Support


class Kept:
    """Of one response."""

    def __init__(self) -> None:
        self._ids = bytearray()
        self._counts = array("i")
        self._log_mass = array("f")

    def add(self, ids: bytes, log_mass: float) -> None:
        """The next token's: ids of what was kept as int32, and the log of their probability before the cut."""
        self._ids += ids
        self._counts.append(len(ids) // self._counts.itemsize)
        self._log_mass.append(log_mass)

    @property
    def state(self) -> tuple[bytes, list[int], list[float]]:
        """In types that may travel between ranks."""
        return bytes(self._ids), self._counts.tolist(), self._log_mass.tolist()

    @staticmethod
    def of(state: tuple[bytes, list[int], list[float]]) -> Kept:
        """From another rank's `state`."""
        found = Kept()
        found._ids, found._counts, found._log_mass = bytearray(state[0]), array("i", state[1]), array("f", state[2])
        return found

    def give(self, rollout: Rollout) -> None:
        """Fills `support` and `log_kept_mass` of the rollout, for its tokens; what came after them is left out.

        Raises:
            RuntimeError: It is of fewer tokens, or a sampled token is none that was kept.
        """
        tokens = torch.tensor(rollout.response_ids, dtype=torch.int32)
        if len(self._counts) < tokens.numel():
            raise RuntimeError(f"what was kept is known of {len(self._counts)} tokens, and {tokens.numel()} came")
        counts_R = torch.tensor(self._counts[: tokens.numel()], dtype=torch.int32)
        ids_K = torch.frombuffer(self._ids, dtype=torch.int32)[: int(counts_R.sum())].clone()
        rows_K = torch.arange(tokens.numel()).repeat_interleave(counts_R)
        found_R = torch.zeros(tokens.numel(), dtype=torch.bool)
        found_R[rows_K[ids_K == tokens[rows_K]]] = True
        if not found_R.all():
            place = int((~found_R).nonzero()[0])
            raise RuntimeError(f"response token {place} ({int(tokens[place])}) is none of those that were kept")
        rollout.support = Support(ids_K, counts_R)
        rollout.log_kept_mass = self._log_mass[: tokens.numel()].tolist()


def add_step(kept_NV: Tensor, log_mass_N: Tensor, responses: Sequence[Kept | None]) -> None:
    """The next token of each row, for the responses that take it.

    Args:
        kept_NV: What was kept, bool.
        log_mass_N: Log of its probability before the cut.
        responses: Of each row; None: the row's token is not used.
    """
    ids = kept_NV.nonzero()[:, 1].to(torch.int32).cpu().numpy().tobytes()
    ends = (kept_NV.sum(1).cumsum(0) * torch.int32.itemsize).tolist()
    for response, start, end, mass in zip(responses, [0, *ends], ends, log_mass_N.tolist(), strict=False):
        if response is not None:
            response.add(ids[start:end], mass)
