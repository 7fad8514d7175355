"""The memory of keys and values: one row of contiguous slots for each running sequence.

Owns the pool, its bound and its shape. Row r of every layer belongs to the sequence that decodes in row r; running
sequences fill the first rows, so that a decode step reads views and gathers nothing. Keys are stored rotated.

Shapes: S rows, K KV heads of this rank, T slots of a row, D head dim.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mrl.errors import UserError

SLOT_MULTIPLE = 16
"""Rows are rounded up to this many slots."""

ALIGNED = 64
"""Bytes of a CPU's cache line, at a multiple of which its pool begins."""


class KVCache:
    """Keys and values of all layers, allocated for one `generate` and kept while they fit the next.

    Args:
        num_layers: Layers.
        num_kv_heads: KV heads of this rank.
        head_dim: D.
        dtype: Of the stored values.
        device: Where the pool is.
        budget_bytes: The pool never takes more.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        budget_bytes: int,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.num_rows = 0
        self.row_len = 0
        self.num_kv_heads = num_kv_heads
        self._shape = (num_layers, num_kv_heads, head_dim)
        self._dtype = dtype
        self._device = device
        self._pool: Tensor | None = None
        self._memory: torch.cuda.MemPool | None = None
        self._rows = torch.empty(0)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.alike: tuple[Tensor, Tensor] | None = None
        self._told: tuple[list[int], list[int]] | None = None

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers of this rank."""
        layers, heads, dim = self._shape
        return 2 * layers * heads * dim * self._dtype.itemsize

    def fitting(self, row_len: int, other_row_bytes: int = 0) -> int:
        """Rows for which the budget has room."""
        return self.budget_bytes // (_slots(row_len) * self.token_bytes + other_row_bytes)

    def reserve(self, wanted_rows: int, row_len: int, other_row_bytes: int = 0) -> int:
        """Makes room for as many of `wanted_rows` rows as the budget allows; returns how many.

        Args:
            wanted_rows: Sequences that could run at a time.
            row_len: Tokens of the longest sequence.
            other_row_bytes: What else each row takes; counts against the budget.

        Raises:
            UserError: Not even one row fits.
        """
        layers, heads, dim = self._shape
        slots = _slots(row_len)
        rows = min(wanted_rows, self.fitting(row_len, other_row_bytes))
        if rows < 1:
            row_bytes = slots * self.token_bytes + other_row_bytes
            raise UserError(
                f"rollout.gpu_memory_utilization leaves {self.budget_bytes / 2**20:.1f} MiB for the KV cache, but one "
                f"sequence of {row_len} tokens takes {row_bytes / 2**20:.1f} MiB. Raise it, shorten "
                "rollout.prompt_length or rollout.response_length, or raise rollout.tensor_model_parallel_size."
            )
        if self._pool is not None and (rows, slots) == (self.num_rows, self.row_len):
            return rows
        elements = 2 * layers * rows * heads * slots * dim
        if self._pool is None or self._pool.numel() < elements:
            self.free()
            self._pool = self._allocate(elements)
        self.num_rows, self.row_len = rows, slots
        self._rows = self._pool[:elements].view(2, layers, rows, heads, slots, dim)
        self.keys, self.values = list(self._rows[0]), list(self._rows[1])
        return rows

    def _allocate(self, elements: int) -> Tensor:
        """Zeros; on a GPU in memory of its own: what is allocated while the pool is away must not settle in its place.

        On a CPU the system gives pages of zeros when they are touched, and most of a row is never reached.
        """
        if self._device.type == "cpu":
            pages = torch.from_numpy(np.zeros(elements * self._dtype.itemsize + ALIGNED, dtype=np.uint8))
            first = -pages.data_ptr() % ALIGNED
            return pages[first : first + elements * self._dtype.itemsize].view(self._dtype)
        self._memory = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._memory, self._device):
            return torch.zeros(elements, dtype=self._dtype, device=self._device)

    def free(self) -> None:
        """Gives the memory back, on a GPU to the device; `reserve` takes it again."""
        self._pool = None
        self._rows = torch.empty(0)
        self._memory = None
        self.keys, self.values = [], []
        self.num_rows = self.row_len = 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the pool now."""
        return 0 if self._pool is None else self._pool.numel() * self._pool.element_size()

    def tell_alike(self, told: tuple[list[int], list[int]]) -> None:
        """For each row another one, and how many first slots of both hold the same, until this is told again."""
        if told is not self._told:
            self._told, self.alike = told, (torch.tensor(told[0]), torch.tensor(told[1]))

    def copy_row(self, source: int, target: int, length: int, num_targets: int = 1) -> None:
        """Copies the first `length` slots of a row to another one, or to several from `target` on, in all layers."""
        last = target + num_targets
        self._rows[:, :, target:last, :, :length] = self._rows[:, :, source : source + 1, :, :length]


def _slots(row_len: int) -> int:
    return -(-row_len // SLOT_MULTIPLE) * SLOT_MULTIPLE
