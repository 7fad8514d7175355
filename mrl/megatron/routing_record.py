"""Routing record: the experts that the actor itself chose for a batch, replayed by its updates ("R2" router replay).

The choices come from the routers, each with a part of a microbatch's tokens and its stage's layers, and are put into
the order of the batch, which any other split into microbatches can use.

The Qwen team's GSPO report (arXiv 2507.18071, section 5.3) describes it: each update uses the experts of the old
policy, so that a ratio of probabilities compares the same experts.

Shapes: as in `mrl/types.py`; n tokens on this rank, I packed inputs, L layers of this stage, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.distributed.groups import ProcessGroups
from mrl.types import RolloutBatch


class RoutingRecorder:
    """Recorder of the experts chosen in one pass over a batch."""

    def __init__(self, groups: ProcessGroups, *, num_layers: int, top_k: int, dtype: torch.dtype) -> None:
        """Creates an empty record.

        Args:
            groups: Process groups whose ranks share the tokens of a microbatch.
            num_layers: Layers of this stage with experts, L.
            top_k: Experts per token, K.
            dtype: Integer dtype that can represent every expert's index and -1.
        """
        self._groups, self._shape, self._dtype = groups, (num_layers, top_k), dtype
        self._parts: dict[int, Tensor] = {}

    def allocate(self, num_rows: int, device: torch.device) -> Tensor:
        """Allocates the buffer [n, L, K], filled with -1, that the routers of a chunk write to.

        Args:
            num_rows: Rows of the microbatch on all tensor-parallel ranks.
            device: Device of the buffer.
        """
        return torch.full((num_rows // self._groups.tp.size(), *self._shape), -1, dtype=self._dtype, device=device)

    def record(self, index: int, chosen_nLK: Tensor) -> None:
        """Records a chunk's choices for microbatch `index`: those of its layers, -1 for the stage's other chunks."""
        on_cpu = chosen_nLK.cpu()
        before = self._parts.get(index)
        self._parts[index] = on_cpu if before is None else torch.maximum(before, on_cpu)

    def in_batch_order(self, batch: RolloutBatch, microbatches: Iterable[tuple[Sequence[int], Tensor]]) -> Tensor:
        """Collective over tensor- and context-parallel: returns the choices for each token of the batch.

        Args:
            batch: Batch of the recorded pass.
            microbatches: Sequences of each microbatch, and its `row_I`.

        Returns:
            routed_experts_P, on the CPU; -1 for the last token of a sequence, which is not an input.
        """
        routed_P = torch.full((batch.tokens_P.numel(), *self._shape), -1, dtype=self._dtype)
        lens, ends = batch.seq_lens_B.tolist(), batch.seq_lens_B.cumsum(0).tolist()
        for index, (rows, row_I) in enumerate(microbatches):
            all_rows = self._of_all_ranks(self._parts.pop(index))
            parts = torch.split(all_rows[row_I], [lens[row] - 1 for row in rows])
            for row, part in zip(rows, parts, strict=True):
                routed_P[ends[row] - lens[row] : ends[row] - 1] = part
        return routed_P

    def _of_all_ranks(self, part: Tensor) -> Tensor:
        """Gathers all rows of a microbatch; tensor-parallel ranks have parts of a context-parallel rank's rows."""
        for group in (self._groups.tp, self._groups.cp):
            if group.size() > 1:
                own = part.view(torch.uint8)  # gloo gathers no int16
                gathered = [torch.empty_like(own) for _ in range(group.size())]
                dist.all_gather(gathered, own, group=group)
                part = torch.cat(gathered).view(self._dtype)
        return part
