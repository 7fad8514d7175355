"""The experts that the actor itself chose for a batch, for the updates on it to replay (routing replay, "R2").

Owns the way back of the choices: from the routers, each with a part of a microbatch's tokens and its stage's layers, to
the order of the batch, which any other cut into microbatches can be made from.

The Qwen team's GSPO report (arXiv 2507.18071, section 5.3) describes it: each update goes to the experts of the policy
that sampled, so that a ratio of probabilities compares one set of experts with itself.

Shapes: as in `mrl/types.py`; n tokens on this rank, I packed inputs, L layers of this stage, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.distributed.groups import ProcessGroups
from mrl.types import RolloutBatch


class Choices:
    """What one pass over a batch chose."""

    def __init__(self, groups: ProcessGroups, *, num_layers: int, top_k: int, dtype: torch.dtype) -> None:
        """Nothing yet.

        Args:
            groups: Who shares the tokens of a microbatch.
            num_layers: L.
            top_k: K.
            dtype: Holds an expert's index, and -1.
        """
        self._groups, self._shape, self._dtype = groups, (num_layers, top_k), dtype
        self._parts: dict[int, Tensor] = {}

    def room(self, num_rows: int, device: torch.device) -> Tensor:
        """Where the routers of a chunk write, -1 now: [n, L, K] of a microbatch with `num_rows` on these TP ranks."""
        return torch.full((num_rows // self._groups.tp.size(), *self._shape), -1, dtype=self._dtype, device=device)

    def keep(self, index: int, chosen_nLK: Tensor) -> None:
        """What a chunk chose for microbatch `index`: its layers, -1 for those of the stage's other chunks."""
        here = chosen_nLK.cpu()
        before = self._parts.get(index)
        self._parts[index] = here if before is None else torch.maximum(before, here)

    def in_order(self, batch: RolloutBatch, microbatches: Iterable[tuple[Sequence[int], Tensor]]) -> Tensor:
        """Collective over tensor- and context-parallel: the choices for each token of the batch.

        Args:
            batch: That the pass was over.
            microbatches: Sequences of each, and their `row_I`.

        Returns:
            routed_experts_P, on the CPU; -1 for the last token of a sequence, which is no input.
        """
        routed_P = torch.full((batch.tokens_P.numel(), *self._shape), -1, dtype=self._dtype)
        lens, ends = batch.seq_lens_B.tolist(), batch.seq_lens_B.cumsum(0).tolist()
        for index, (rows, row_I) in enumerate(microbatches):
            whole = self._of_all_ranks(self._parts.pop(index))
            parts = torch.split(whole[row_I], [lens[row] - 1 for row in rows])
            for row, part in zip(rows, parts, strict=True):
                routed_P[ends[row] - lens[row] : ends[row] - 1] = part
        return routed_P

    def _of_all_ranks(self, part: Tensor) -> Tensor:
        """All rows of a microbatch: tensor-parallel ranks have runs of what a context-parallel one has."""
        for group in (self._groups.tp, self._groups.cp):
            if group.size() > 1:
                own = part.view(torch.uint8)  # gloo gathers no int16
                gathered = [torch.empty_like(own) for _ in range(group.size())]
                dist.all_gather(gathered, own, group=group)
                part = torch.cat(gathered).view(self._dtype)
        return part
