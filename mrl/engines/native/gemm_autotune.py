"""The forms in which a CPU can multiply few rows by a weight, and which of them a product takes: the fastest measured.

Owns the measurement. Each form's product of one shape is timed once on a machine, in milliseconds, and the name of the
fastest is kept in the user's cache folder by processor, PyTorch, compiled functions, dtype and shape. One thread
multiplies, and its processor time counts: neither other programs nor the run's threads turn the choice. Forms differ in
the last bits, so the choice must stand still: what is kept holds for every later run; all engines of a job take what
the first of them took, and keep that; a form that is not `PACKED` must win by `MARGIN`, so that noise decides nothing;
without a place to keep the choice it is `PACKED`. No form is taken where the bits of a row depend on the rows beside
it, which is tried first: oneDNN's do in bfloat16 on processors with AMX, whatever the size of the matrix. Where nothing
can be compiled and none will do, it is `PACKED` all the same. Small matrices are not measured: the compiled form has
them where there is one, whose packing takes less than oneDNN's.

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

from mrl.models.kernels import library, machine

ROWS_HINT = 64
"""Rows that the inner product's order is chosen for; any value from 8 up gives the same order."""

SMALLEST = 2**18
"""Elements of a weight whose forms are measured; no difference is felt in products of a smaller one."""

LARGEST = 2**21
"""Elements of a weight in a measurement; a larger one is measured by its first rows."""

ROWS = (8, 32)
"""Of the measured products."""

MARGIN = 0.9
"""A form must take at most this part of `PACKED`'s time: the difference is felt, and does not turn in another run."""

TRIED_ROWS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 65, 129, 257)
"""Numbers of rows for which a row must have the same bits."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Form:
    """One way to multiply.

    Attributes:
        name: In the cache folder.
        pack: (weight [O, I], what an earlier call made or None) -> the weight as `product` takes it.
        product: (x [P, I], packed, bias [O]) -> [P, O].
        least: Fewest rows: below it another kernel adds long sums in another order. x is padded.
        multiple: Of which the rows are; x is padded.
        copies: Whether `pack` makes a copy.
        in_place: Whether that takes the place of what it made earlier of a weight of this shape. Memory that is new
            each time costs more than the packing.
    """

    name: str
    pack: Callable[[Tensor, Tensor | None], Tensor]
    product: Product
    least: int
    multiple: int
    copies: bool
    in_place: bool = False

    def __call__(self, x_PI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
        """The product [P, O], contiguous."""
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
    del earlier  # oneDNN takes memory of its own
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, ROWS_HINT)
    return packed


def _turned(weight_OI: Tensor, earlier: Tensor | None) -> Tensor:
    return weight_OI.t().contiguous() if earlier is None else earlier.copy_(weight_OI.t())


PACKED = Form("packed", _reordered, _inner_product, least=2, multiple=1, copies=True)
"""oneDNN's inner product over a weight in an order of its own choice, so that no product reorders it."""

PLAIN = Form("plain", lambda weight_OI, _: weight_OI, F.linear, least=16, multiple=16, copies=False)
"""The weight as it is stored; kernels for few rows are not met."""

TRANSPOSED = Form("transposed", _turned, _transposed, least=16, multiple=16, copies=True, in_place=True)
"""The weight [I, O]."""

FORMS = {form.name: form for form in (PACKED, PLAIN, TRANSPOSED)}
"""Those that need no compiler, by name."""

ROW_BY_ROW = "row_by_row"


@cache
def row_by_row(outputs: int, dtype: torch.dtype) -> Form:
    """The compiled form, by which the actor can compute too: each element is one sum in one order, whatever the rows.

    Raises:
        UserError: Nothing can be compiled here.
    """
    compiled = library.required(dtype)

    def product(x_PI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
        return compiled.product(x_PI, packed, bias_O, outputs)

    return Form(ROW_BY_ROW, compiled.pack, product, least=1, multiple=1, copies=True, in_place=True)


def candidates(outputs: int, dtype: torch.dtype, *, compiled: bool) -> dict[str, Form]:
    """The forms of a product with so many outputs, by name; `compiled`: what the job compiles is among them."""
    return {**FORMS, ROW_BY_ROW: row_by_row(outputs, dtype)} if compiled else FORMS


def form_of(shape: tuple[int, ...], dtype: torch.dtype, *, compiled: bool = False) -> Form:
    """The form of products with weights of this shape [O, I] and dtype, on this machine and in this job."""
    outputs, inputs = shape
    if outputs * inputs < SMALLEST:
        return row_by_row(outputs, dtype) if compiled else PACKED
    name = _chosen(min(outputs, max(1, LARGEST // inputs)), inputs, dtype, compiled)
    return candidates(outputs, dtype, compiled=compiled)[name]


@cache
def _chosen(outputs: int, inputs: int, dtype: torch.dtype, compiled: bool) -> str:
    known = candidates(outputs, dtype, compiled=compiled)
    what = f"{str(dtype).removeprefix('torch.')}-{outputs}x{inputs}{'-compiled' if compiled else ''}"
    code = library.required(dtype).key if compiled else ""
    name = f"products/{machine.key(machine.processor(), torch.__version__, code, str(TRIED_ROWS))}/{what}"
    found = machine.settled(
        name, f"product/{what}", lambda: fastest((outputs, inputs), dtype, compiled=compiled).name, PACKED.name
    )
    return found if found in known else PACKED.name


def fastest(shape: tuple[int, int], dtype: torch.dtype, *, compiled: bool) -> Form:
    """Measures the forms, which takes milliseconds."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.empty(shape).uniform_(-1.0, 1.0, generator=generator).to(dtype)
    forms = candidates(shape[0], dtype, compiled=compiled).values()
    packed = {form: form.pack(weight_OI, None) for form in forms}
    part = dict.fromkeys(packed, 0.0)
    for rows in ROWS:
        x_PI = torch.empty(rows, shape[1]).uniform_(-1.0, 1.0, generator=generator).to(dtype)
        best = machine.best_times({form: partial(form, x_PI, packed[form], None) for form in forms})
        for form in forms:
            part[form] += best[form] / best[PACKED] / len(ROWS)
    ranked = sorted(part, key=lambda form: part[form])
    felt = [form for form in ranked if form is PACKED or part[form] < MARGIN]
    # where none of these will do: the fastest of the rest
    return next((form for form in (*felt, *ranked) if rows_stand_alone(form, weight_OI)), PACKED)


def rows_stand_alone(form: Form, weight_OI: Tensor) -> bool:
    """Whether the bits of a row are the same whatever rows are beside it, as far as a trial can tell."""
    generator = torch.Generator().manual_seed(1)
    x_PI = torch.empty(max(TRIED_ROWS) + 3, weight_OI.size(1)).uniform_(-1.0, 1.0, generator=generator)
    x_PI = x_PI.to(weight_OI.dtype)
    packed = form.pack(weight_OI, None)
    threads = torch.get_num_threads()
    try:
        for num_threads in {1, threads, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1}:
            torch.set_num_threads(num_threads)  # with more of them a library cuts the work otherwise
            whole = form(x_PI, packed, None)
            for num in TRIED_ROWS:
                if not torch.equal(form(x_PI[3 : 3 + num], packed, None), whole[3 : 3 + num]):
                    return False
    finally:
        torch.set_num_threads(threads)
    return True
