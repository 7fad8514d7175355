"""GEMM autotuning for products with few rows on a CPU: selects the fastest kernel per weight shape.

Each kernel's product of a shape is timed once per machine (milliseconds), on one thread in CPU time, so that
other programs do not influence the choice. The name of the fastest is stored in the user's cache folder by processor,
PyTorch, compiled functions, dtype and shape.

Kernels differ in the last bits, so the choice must be stable: a stored choice applies to every later run; all engines
of a job use the choice of the first; a kernel other than `PACKED` must win by `MARGIN`; without a cache folder the
choice is `PACKED`. A kernel is rejected if the bits of a row depend on the other rows, which is tested first (oneDNN's
do in bfloat16 on processors with AMX). If every kernel fails the test and nothing can be compiled, the choice is
`PACKED` nevertheless. Small matrices are not measured: they use the compiled kernel if there is one, since it packs
faster than oneDNN.

Shapes: P rows, I inputs, O outputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.models.kernels import bindings, build_cache

ROWS_HINT = 64
"""Row count for which oneDNN chooses its weight layout; any value from 8 up gives the same layout."""

SMALLEST = 2**18
"""Smallest weight that is measured, elements; below it the kernels take about the same time."""

LARGEST = 2**21
"""Largest weight in a measurement, elements; of a larger one the first rows are measured."""

ROWS = (8, 32)
"""Rows of the measured products."""

MARGIN = 0.9
"""Fraction of `PACKED`'s time below which another kernel is chosen; measurement noise cannot reverse such a
difference."""

TRIED_ROWS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 65, 129, 257)
"""Row counts for which a row must have the same bits."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class GemmKernel:
    """A GEMM kernel with its weight layout.

    Attributes:
        name: Name in the cache folder.
        pack: Converts (weight [O, I], earlier result or None) to the layout that `product` reads.
        product: Computes [P, O] from (x [P, I], packed weight, bias [O]).
        least: Fewest rows; with fewer, another kernel would add in another order. x is padded.
        multiple: Divisor of the number of rows; x is padded.
        copies: Whether `pack` makes a copy.
        in_place: Whether `pack` reuses the memory of its earlier result; allocating costs more than packing.
    """

    name: str
    pack: Callable[[Tensor, Tensor | None], Tensor]
    product: Product
    least: int
    multiple: int
    copies: bool
    in_place: bool = False

    def __call__(self, x_PI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
        """Returns the product [P, O], contiguous."""
        num = x_PI.size(0)
        rows = max(self.least, -(-num // self.multiple) * self.multiple)
        if rows != num:
            x_PI = F.pad(x_PI, (0, 0, 0, rows - num))
        return self.product(x_PI, packed, bias_O)[:num]


def _inner_product(x_PI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_PI, packed, bias_O, "none", [], "")
    return out


def _transposed(x_PI: Tensor, weight_IO: Tensor, bias_O: Tensor | None) -> Tensor:
    return x_PI @ weight_IO if bias_O is None else torch.addmm(bias_O, x_PI, weight_IO)


def _reordered(weight_OI: Tensor, earlier: Tensor | None) -> Tensor:
    del earlier  # oneDNN allocates itself
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, ROWS_HINT)
    return packed


def _turned(weight_OI: Tensor, earlier: Tensor | None) -> Tensor:
    return weight_OI.t().contiguous() if earlier is None else earlier.copy_(weight_OI.t())


PACKED = GemmKernel("packed", _reordered, _inner_product, least=2, multiple=1, copies=True)
"""oneDNN's inner product with a weight in oneDNN's own layout, so that no product reorders it."""

PLAIN = GemmKernel("plain", lambda weight_OI, _: weight_OI, F.linear, least=16, multiple=16, copies=False)
"""Weight as stored; padded to 16 rows to avoid kernels for few rows."""

TRANSPOSED = GemmKernel("transposed", _turned, _transposed, least=16, multiple=16, copies=True, in_place=True)
"""Weight transposed to [I, O]."""

FORMS = {form.name: form for form in (PACKED, PLAIN, TRANSPOSED)}
"""Kernels that need no compiler, by name."""

ROW_BY_ROW = "row_by_row"


@cache
def row_by_row(outputs: int, dtype: torch.dtype) -> GemmKernel:
    """Returns the compiled kernel, which the actor can use too: each element is one sum in a fixed order.

    Raises:
        UserError: Nothing can be compiled here.
    """
    compiled = bindings.required(dtype)

    def product(x_PI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
        return compiled.product(x_PI, packed, bias_O, outputs)

    return GemmKernel(ROW_BY_ROW, compiled.pack, product, least=1, multiple=1, copies=True, in_place=True)


def candidates(outputs: int, dtype: torch.dtype, *, compiled: bool) -> dict[str, GemmKernel]:
    """Returns the kernels for so many outputs, by name; `compiled` adds the compiled one."""
    return {**FORMS, ROW_BY_ROW: row_by_row(outputs, dtype)} if compiled else FORMS


def kernel_for(shape: tuple[int, ...], dtype: torch.dtype, *, compiled: bool = False) -> GemmKernel:
    """Returns the kernel for weights of this shape [O, I] and dtype, on this machine and in this job."""
    outputs, inputs = shape
    if outputs * inputs < SMALLEST:
        return row_by_row(outputs, dtype) if compiled else PACKED
    name = _chosen(min(outputs, max(1, LARGEST // inputs)), inputs, dtype, compiled)
    return candidates(outputs, dtype, compiled=compiled)[name]


@cache
def _chosen(outputs: int, inputs: int, dtype: torch.dtype, compiled: bool) -> str:
    known = candidates(outputs, dtype, compiled=compiled)
    what = f"{str(dtype).removeprefix('torch.')}-{outputs}x{inputs}{'-compiled' if compiled else ''}"
    code = bindings.required(dtype).key if compiled else ""
    name = f"products/{build_cache.key(build_cache.processor(), torch.__version__, code, str(TRIED_ROWS))}/{what}"
    found = build_cache.measure_once(
        name, f"product/{what}", lambda: measure_fastest((outputs, inputs), dtype, compiled=compiled).name, PACKED.name
    )
    return found if found in known else PACKED.name


def measure_fastest(shape: tuple[int, int], dtype: torch.dtype, *, compiled: bool) -> GemmKernel:
    """Measures the kernels and returns the fastest valid one."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.empty(shape).uniform_(-1.0, 1.0, generator=generator).to(dtype)
    forms = candidates(shape[0], dtype, compiled=compiled).values()
    packed = {form: form.pack(weight_OI, None) for form in forms}
    part = dict.fromkeys(packed, 0.0)
    for rows in ROWS:
        x_PI = torch.empty(rows, shape[1]).uniform_(-1.0, 1.0, generator=generator).to(dtype)
        best = build_cache.best_times({form: partial(form, x_PI, packed[form], None) for form in forms})
        for form in forms:
            part[form] += best[form] / best[PACKED] / len(ROWS)
    ranked = sorted(part, key=lambda form: part[form])
    faster = [form for form in ranked if form is PACKED or part[form] < MARGIN]
    # the others follow in case that none of these computes rows independently
    return next((form for form in (*faster, *ranked) if is_batch_invariant(form, weight_OI)), PACKED)


def is_batch_invariant(form: GemmKernel, weight_OI: Tensor) -> bool:
    """Returns whether the bits of a row were independent of the other rows in a trial."""
    generator = torch.Generator().manual_seed(1)
    x_PI = torch.empty(max(TRIED_ROWS) + 3, weight_OI.size(1)).uniform_(-1.0, 1.0, generator=generator)
    x_PI = x_PI.to(weight_OI.dtype)
    packed = form.pack(weight_OI, None)
    threads = torch.get_num_threads()
    try:
        for num_threads in {1, threads, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1}:
            torch.set_num_threads(num_threads)  # libraries split the work by the number of threads
            expected = form(x_PI, packed, None)
            for num in TRIED_ROWS:
                if not torch.equal(form(x_PI[3 : 3 + num], packed, None), expected[3 : 3 + num]):
                    return False
    finally:
        torch.set_num_threads(threads)
    return True
