"""KV cache: one row of contiguous slots per running sequence.

Row r of every layer belongs to the sequence that decodes in row r; running sequences fill the first rows, so that a
decode step reads views and gathers nothing. Keys are stored rotated. While the budget allows it the shape only grows,
and its addresses stay the same while the memory is released: captured CUDA graphs read it in the next step too.

A layer with a sliding window needs slots only for the tokens in the window and for those of one forward. Where rows are
longer, its slots are a ring: position p is in slot p % T, and overwrites a token that fell out of the window.

With latent attention (`latent_attention.py`) there are no values: `values` are the keys, the same tensors.

Shapes: S rows, K KV heads of this rank, T slots of a row (fewer in a ring), D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.engines.native.releasable_memory import MemoryRange
from mrl.errors import UserError

SLOT_MULTIPLE = 16
"""Slots per row are rounded up to a multiple of this."""
RING_MULTIPLE = 64
"""The slots of a ring are rounded up to a multiple of this, `SPAN` of `kernels.c`."""
RING_SPARE = 256
"""Least slots of a ring beyond the window: most tokens of a row in one forward."""


class KVCache:
    """Keys and values of all layers.

    Attributes:
        num_rows: S; at least what the last `reserve` returned.
        row_len: T; at least what the last `reserve` asked for.
        keys: Keys of each layer [S, K, T, D]; empty while the memory is released.
        values: Values of each layer [S, K, T, D]; empty while the memory is released.
        shared_prefixes: Arguments of the last `set_shared_prefixes` as tensors.
        windows: Sliding window of each layer; None: the layer attends to all tokens.
        scale: Factor of attention's scores; None: D ** -0.5.
        keys_only: True if the values are the keys.

    Args:
        windows: See above; one entry per layer.
        num_kv_heads: KV heads of this rank.
        head_dim: D.
        dtype: Dtype of keys and values.
        device: Device of the cache.
        budget_bytes: Most bytes of the cache.
        scale: See above.
        keys_only: See above.
    """

    def __init__(
        self,
        *,
        windows: Sequence[int | None],
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        budget_bytes: int,
        scale: float | None = None,
        keys_only: bool = False,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.num_rows = 0
        self.row_len = 0
        self.num_kv_heads = num_kv_heads
        self.windows, self.scale, self.keys_only = list(windows), scale, keys_only
        window = next((each for each in windows if each is not None), None)
        self._ring = None if window is None else ring_slots(window)
        self._num_windowed = sum(each is not None for each in windows)
        self._head_dim = head_dim
        self._dtype = dtype
        self._device = device
        self._range: MemoryRange | None = None
        self._rows: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.shared_prefixes: tuple[Tensor, Tensor] | None = None
        self._shared: tuple[list[int], list[int]] | None = None

    def row_bytes(self, row_len: int) -> int:
        """Returns the bytes of the keys and values of one row in all layers of this rank."""
        full, ring = self._slots(row_len)
        tokens = (len(self.windows) - self._num_windowed) * full + self._num_windowed * ring
        return self._num_tensors * self.num_kv_heads * self._head_dim * self._dtype.itemsize * tokens

    def fitting(self, row_len: int, other_row_bytes: int = 0) -> int:
        """Returns the number of rows that fit into the budget."""
        return self.budget_bytes // (self.row_bytes(row_len) + other_row_bytes)

    def reserve(self, wanted_rows: int, row_len: int, other_row_bytes: int = 0) -> int:
        """Allocates as many of `wanted_rows` rows as the budget allows; returns their number.

        Args:
            wanted_rows: Sequences that could run at a time.
            row_len: Longest sequence, tokens.
            other_row_bytes: Bytes of each row outside the cache; they count against the budget.

        Raises:
            UserError: Not even one row fits.
        """
        slots, _ = self._slots(row_len)
        rows = min(wanted_rows, self.fitting(row_len, other_row_bytes))
        if rows < 1:
            row_bytes = self.row_bytes(row_len) + other_row_bytes
            raise UserError(
                f"rollout.gpu_memory_utilization leaves {self.budget_bytes / 2**20:.1f} MiB for the KV cache, but one "
                f"sequence of {row_len} tokens takes {row_bytes / 2**20:.1f} MiB. Raise it, shorten "
                "rollout.prompt_length or rollout.response_length, or raise rollout.tensor_model_parallel_size."
            )
        if rows > self.num_rows or slots > self.row_len:
            most = max(rows, self.num_rows), max(slots, self.row_len)
            row_bytes = self.row_bytes(most[1]) + most[1] * -(-other_row_bytes // slots)
            self.num_rows, self.row_len = most if most[0] * row_bytes <= self.budget_bytes else (rows, slots)
            self._rows = []
        if not self._rows:
            self._allocate()
        return rows

    @property
    def _num_tensors(self) -> int:
        """Tensors of a layer: keys and values, or keys."""
        return 1 if self.keys_only else 2

    @property
    def wraps(self) -> bool:
        """Whether some layer's row is a ring that is shorter than a row."""
        return self._ring is not None and self._ring < self.row_len

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of a row in one forward; None: no limit."""
        window = next((each for each in self.windows if each is not None), 0)
        return None if not self.wraps or self._ring is None else self._ring - window

    def _slots(self, row_len: int) -> tuple[int, int]:
        """Returns the slots of a row in a layer without and in one with a sliding window."""
        slots = -(-row_len // SLOT_MULTIPLE) * SLOT_MULTIPLE
        return slots, slots if self._ring is None else min(slots, self._ring)

    def _allocate(self) -> None:
        """Allocates the memory of all layers; newly allocated parts are zero."""
        counts = (len(self.windows) - self._num_windowed, self._num_windowed)
        shapes = [
            torch.Size((self._num_tensors, count, self.num_rows, self.num_kv_heads, slots, self._head_dim))
            for count, slots in zip(counts, self._slots(self.row_len), strict=True)
        ]
        sizes = [shape.numel() * self._dtype.itemsize for shape in shapes]
        needed = sum(sizes)
        if self._range is None or needed > self._range.num_bytes:
            # address space costs nothing on a GPU: with that of the full budget the cache grows in place
            most = self.budget_bytes if self._device.type == "cuda" else 0
            self._range = None
            self._range = MemoryRange(max(needed, most), self._device)
        self._range.take(needed)
        full, ring = (
            self._range.tensor(offset, shape, self._dtype) for offset, shape in zip((0, sizes[0]), shapes, strict=True)
        )
        self._rows = [full, ring]
        layers = [iter(rows.unbind(1)) for rows in self._rows]
        stored = [next(layers[window is not None]).unbind(0) for window in self.windows]
        self.keys, self.values = [each[0] for each in stored], [each[-1] for each in stored]

    def free(self) -> None:
        """Releases the memory; `reserve` allocates it again, at the same addresses and in the same shape."""
        self._rows = []
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
        return tuple(number for rows in self._rows for number in (rows.data_ptr(), *rows.shape))

    def set_shared_prefixes(self, shared: tuple[list[int], list[int]]) -> None:
        """Sets, for each row, another row and the number of leading slots that both share, until the next call."""
        if shared is not self._shared:
            self._shared, self.shared_prefixes = shared, (torch.tensor(shared[0]), torch.tensor(shared[1]))

    def copy_row(self, source: int, target: int, length: int, num_targets: int = 1) -> None:
        """Copies the slots of the first `length` positions of a row to `num_targets` rows from `target` on."""
        last = target + num_targets
        for rows in self._rows:  # a ring has fewer slots, and is copied whole
            rows[:, :, target:last, :, :length] = rows[:, :, source : source + 1, :, :length]


def ring_slots(window: int) -> int:
    """Returns the slots of a ring for a sliding window of `window` tokens."""
    wanted = window + max(RING_SPARE, window // 4)
    return -(-wanted // RING_MULTIPLE) * RING_MULTIPLE
