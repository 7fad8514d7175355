"""KV cache: one row of contiguous slots per running sequence.

Row r of every layer belongs to the sequence that decodes in row r; running sequences fill the first rows, so that a
decode step reads views and gathers nothing. Keys are stored rotated. While the budget allows it the shape only grows,
and its addresses stay the same while the memory is released: captured CUDA graphs read it in the next step too.

A layer with a sliding window needs slots only for the tokens in the window and for those of one forward. Where rows are
longer, its slots are a ring: position p is in slot p % T, and overwrites a token that fell out of the window.

With latent attention (`latent_attention.py`) there are no values: `values` are the keys, the same tensors. A layer with
linear attention has a state of fixed size for each row instead of slots.

Shapes: S rows, K KV heads of this rank, T slots of a row (fewer in a ring), D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mrl.engines.native.releasable_memory import MemoryRange
from mrl.errors import UserError
from mrl.models.base import ArchSpec

SLOT_MULTIPLE = 16
"""Slots per row are rounded up to a multiple of this."""
RING_MULTIPLE = 64
"""The slots of a ring are rounded up to a multiple of this, `SPAN` of `kernels.c`."""
RING_SPARE = 256
"""Least slots of a ring beyond the window: most tokens of a row in one forward."""


@dataclass(frozen=True)
class StateShape:
    """State of a row in the layers with linear attention.

    Attributes:
        num_layers: Number of these layers.
        conv_inputs: Shape of the last inputs of the convolution, in the dtype of keys: tokens, channels.
        state: Shape of the recurrent state, in fp32: value heads, key dims, value dims.
    """

    num_layers: int
    conv_inputs: tuple[int, int]
    state: tuple[int, int, int]

    def row_bytes(self, item_bytes: int) -> int:
        """Returns the bytes of a row's states in all layers; `item_bytes`: of a number in the dtype of keys."""
        each = math.prod(self.conv_inputs) * item_bytes + math.prod(self.state) * torch.float32.itemsize
        return self.num_layers * each


def state_shape(arch: ArchSpec, tp_size: int) -> StateShape | None:
    """Returns the states of a model on one rank of a replica; None: no layer has linear attention."""
    linear = arch.linear_attention
    if linear is None:
        return None
    conv_inputs = linear.conv_kernel - 1, linear.channels // tp_size
    state = linear.num_value_heads // tp_size, linear.key_head_dim, linear.value_head_dim
    return StateShape(len(linear.layers), conv_inputs, state)


class KVCache:
    """Keys and values of the layers with softmax attention, and states of those with linear attention.

    Attributes:
        num_rows: S; at least what the last `reserve` returned.
        row_len: T; at least what the last `reserve` asked for.
        keys: Keys of each layer [S, K, T, D]; empty while the memory is released.
        values: Values of each layer [S, K, T, D]; empty while the memory is released.
        conv_inputs: Last inputs of the convolution of each layer with linear attention, [S, tokens, channels].
        states: Recurrent state of each layer with linear attention, fp32 [S, heads, key dims, value dims].
        shared_prefixes: Arguments of the last `set_shared_prefixes` as tensors.
        windows: Sliding window of each layer with softmax attention; None: the layer attends to all tokens.
        scale: Factor of attention's scores; None: D ** -0.5.
        keys_only: True if the values are the keys.
        device: Device of the cache.

    Args:
        windows: See above; one entry per layer.
        num_kv_heads: KV heads of this rank.
        head_dim: D.
        dtype: Dtype of keys and values.
        device: See above.
        budget_bytes: Most bytes of the cache.
        scale: See above.
        keys_only: See above.
        state: States of a row; None: no layer has linear attention.
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
        state: StateShape | None = None,
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
        self.device = device
        self._range: MemoryRange | None = None
        self._rows: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._state = state
        self._state_rows: list[Tensor] = []
        self.conv_inputs: list[Tensor] = []
        self.states: list[Tensor] = []
        self.shared_prefixes: tuple[Tensor, Tensor] | None = None
        self._shared: tuple[list[int], list[int]] | None = None

    def row_bytes(self, row_len: int) -> int:
        """Returns the bytes of the keys, values and states of one row in all layers of this rank."""
        full, ring = self._slots(row_len)
        tokens = (len(self.windows) - self._num_windowed) * full + self._num_windowed * ring
        states = 0 if self._state is None else self._state.row_bytes(self._dtype.itemsize)
        return self._num_tensors * self.num_kv_heads * self._head_dim * self._dtype.itemsize * tokens + states

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
        dtypes = [self._dtype, self._dtype]
        if self._state is not None:
            layers, rows = self._state.num_layers, self.num_rows
            shapes += [torch.Size((layers, rows, *shape)) for shape in (self._state.state, self._state.conv_inputs)]
            dtypes += [torch.float32, self._dtype]
        sizes = [shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        needed = sum(sizes)
        if self._range is None or needed > self._range.num_bytes:
            # address space costs nothing on a GPU: with that of the full budget the cache grows in place
            most = self.budget_bytes if self.device.type == "cuda" else 0
            self._range = None
            self._range = MemoryRange(max(needed, most), self.device)
        self._range.take(needed)
        offsets = accumulate(sizes[:-1], initial=0)
        tensors = [self._range.tensor(*each) for each in zip(offsets, shapes, dtypes, strict=True)]
        self._rows, self._state_rows = tensors[:2], tensors[2:]
        by_kind = [iter(rows.unbind(1)) for rows in self._rows]
        stored = [next(by_kind[window is not None]).unbind(0) for window in self.windows]
        self.keys, self.values = [each[0] for each in stored], [each[-1] for each in stored]
        if self._state_rows:
            self.states, self.conv_inputs = ([*each.unbind()] for each in self._state_rows)

    def free(self) -> None:
        """Releases the memory; `reserve` allocates it again, at the same addresses and in the same shape."""
        self._rows, self._state_rows = [], []
        self.keys, self.values, self.states, self.conv_inputs = [], [], [], []
        if self._range is not None:
            self._range.release()

    @property
    def allocated_bytes(self) -> int:
        """Bytes currently allocated."""
        return 0 if self._range is None else self._range.held_bytes

    @property
    def addresses(self) -> tuple[int, ...]:
        """Address and shape of the cache, on which captured graphs depend; valid while memory is allocated."""
        tensors = [*self._rows, *self._state_rows]
        return tuple(number for rows in tensors for number in (rows.data_ptr(), *rows.shape))

    def set_shared_prefixes(self, shared: tuple[list[int], list[int]]) -> None:
        """Sets, for each row, another row and the number of leading slots that both share, until the next call."""
        if shared is not self._shared:
            self._shared, self.shared_prefixes = shared, (torch.tensor(shared[0]), torch.tensor(shared[1]))

    def copy_row(self, source: int, target: int, length: int, num_targets: int = 1) -> None:
        """Copies the slots of the first `length` positions of a row to `num_targets` rows from `target` on.

        States are copied as they are: with linear attention the row must contain exactly these positions.
        """
        last = target + num_targets
        for rows in self._rows:  # a ring has fewer slots, and is copied whole
            rows[:, :, target:last, :, :length] = rows[:, :, source : source + 1, :, :length]
        for rows in self._state_rows:
            rows[:, target:last] = rows[:, source : source + 1]


def ring_slots(window: int) -> int:
    """Returns the slots of a ring for a sliding window of `window` tokens."""
    wanted = window + max(RING_SPARE, window // 4)
    return -(-wanted // RING_MULTIPLE) * RING_MULTIPLE
