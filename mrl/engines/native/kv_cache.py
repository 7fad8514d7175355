"""KV cache: one row of contiguous slots per running sequence.

Row r of every layer belongs to the sequence that decodes in row r; running sequences fill the first rows, so that a
decode step reads views and gathers nothing. Keys are stored rotated. While the budget allows it the shape only grows,
and its addresses stay the same while the memory is released: captured CUDA graphs read it in the next step too.

Shapes: S rows, K KV heads of this rank, T slots of a row, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.engines.native.releasable_memory import MemoryRange
from mrl.errors import UserError

SLOT_MULTIPLE = 16
"""Slots per row are rounded up to a multiple of this."""


class KVCache:
    """Keys and values of all layers.

    Attributes:
        num_rows: S; at least what the last `reserve` returned.
        row_len: T; at least what the last `reserve` asked for.
        keys: Keys of each layer [S, K, T, D]; empty while the memory is released.
        values: Values of each layer [S, K, T, D]; empty while the memory is released.
        shared_prefixes: Arguments of the last `set_shared_prefixes` as tensors.

    Args:
        num_layers: Number of layers.
        num_kv_heads: KV heads of this rank.
        head_dim: D.
        dtype: Dtype of keys and values.
        device: Device of the cache.
        budget_bytes: Most bytes of the cache.
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
        self._range: MemoryRange | None = None
        self._rows = torch.empty(0)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.shared_prefixes: tuple[Tensor, Tensor] | None = None
        self._shared: tuple[list[int], list[int]] | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers of this rank."""
        layers, heads, dim = self._shape
        return 2 * layers * heads * dim * self._dtype.itemsize

    def fitting(self, row_len: int, other_row_bytes: int = 0) -> int:
        """Returns the number of rows that fit into the budget."""
        return self.budget_bytes // (_slots(row_len) * self.token_bytes + other_row_bytes)

    def reserve(self, wanted_rows: int, row_len: int, other_row_bytes: int = 0) -> int:
        """Allocates as many of `wanted_rows` rows as the budget allows; returns their number.

        Args:
            wanted_rows: Sequences that could run at a time.
            row_len: Longest sequence, tokens.
            other_row_bytes: Bytes of each row outside the cache; they count against the budget.

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
        if rows > self.num_rows or slots > self.row_len:
            most = max(rows, self.num_rows), max(slots, self.row_len)
            slot_bytes = self.token_bytes + -(-other_row_bytes // slots)
            self.num_rows, self.row_len = most if most[0] * most[1] * slot_bytes <= self.budget_bytes else (rows, slots)
            self._rows = torch.empty(0)
        if not self._rows.numel():
            self._rows = self._take(2, layers, self.num_rows, heads, self.row_len, dim)
            self.keys, self.values = list(self._rows[0]), list(self._rows[1])
        return rows

    def _take(self, *shape: int) -> Tensor:
        """Returns the memory; newly allocated parts are zero."""
        needed = torch.Size(shape).numel() * self._dtype.itemsize
        if self._range is None or needed > self._range.num_bytes:
            # address space costs nothing on a GPU: with that of the full budget the cache grows in place
            most = self.budget_bytes if self._device.type == "cuda" else 0
            self._range = None
            self._range = MemoryRange(max(needed, most), self._device)
        self._range.take(needed)
        return self._range.tensor(0, shape, self._dtype)

    def free(self) -> None:
        """Releases the memory; `reserve` allocates it again, at the same addresses and in the same shape."""
        self._rows = torch.empty(0)
        self.keys, self.values = [], []
        if self._range is not None:
            self._range.release()

    @property
    def allocated_bytes(self) -> int:
        """Bytes currently allocated."""
        return 0 if self._range is None else self._range.held_bytes

    @property
    def addresses(self) -> tuple[int, ...]:
        """Address and shape of the cache, on which captured graphs depend; valid while memory is allocated."""
        return self._rows.data_ptr(), *self._rows.shape

    def set_shared_prefixes(self, shared: tuple[list[int], list[int]]) -> None:
        """Sets, for each row, another row and the number of leading slots that both share, until the next call."""
        if shared is not self._shared:
            self._shared, self.shared_prefixes = shared, (torch.tensor(shared[0]), torch.tensor(shared[1]))

    def copy_row(self, source: int, target: int, length: int, num_targets: int = 1) -> None:
        """Copies the first `length` slots of a row to `num_targets` rows from `target` on, in all layers."""
        last = target + num_targets
        self._rows[:, :, target:last, :, :length] = self._rows[:, :, source : source + 1, :, :length]


def _slots(row_len: int) -> int:
    return -(-row_len // SLOT_MULTIPLE) * SLOT_MULTIPLE
