"""Slices into a sink: what is handed over, and whether what came is what was given.

Owns the comparison. A slice comes with the sum of its bits as its sender had them (`WeightSlice.given`), or counts as
sent by this rank; a sink that writes it says the sum of what it wrote (`WeightSlice.written`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from mrl.resharding.checksum import MODULUS, bits
from mrl.resharding.weight_slice import WeightSlice

Sink = Callable[[Sequence[WeightSlice]], None]


def hand_over(items: Sequence[WeightSlice], sink: Sink, where: str) -> tuple[int, bool]:
    """Gives slices to a sink and compares the bits that were given with those that came.

    Args:
        items: Where `given` is there, it is the sender's; elsewhere it is set to what was found.
        sink: Takes them.
        where: For messages.

    Returns:
        (sum of what was given modulo 2^64, whether all of it was written with `WeightSlice.write_to`).

    Raises:
        RuntimeError: The sink failed, or bits differ; tensors are named.
    """
    if not items:
        return 0, True
    try:
        sink(items)
    except Exception as error:
        raise RuntimeError(f"{where}: writing {_names(items)} failed: {error}") from error
    given, came = [], []
    for item in items:
        found = item.written if item.written is not None else bits(item.data)
        item.given = item.given if item.given is not None else found
        came.append(found)
        given.append(item.given)
    sums = torch.stack([torch.stack(given), torch.stack(came)]).tolist()  # waits for a GPU once
    for item, sent, arrived in zip(items, *sums, strict=True):
        if sent != arrived:
            raise RuntimeError(f"{where}: {difference(item, sent, arrived)}")
    return sum(sums[0]) % MODULUS, all(item.written is not None for item in items)


def difference(item: WeightSlice, sent: int, arrived: int) -> str:
    """Why the sums of a slice are not the same."""
    came = int(bits(item.data))
    region = f"'{item.name}' {list(item.region)}"
    if came == sent:
        return (
            f"what was written of {region} adds up to {arrived % MODULUS:016x}, what was given to "
            f"{sent % MODULUS:016x}: "
            "a write was lost, or something else wrote"
        )
    return f"what arrived adds up to {came % MODULUS:016x}, what was sent to {sent % MODULUS:016x}; damaged: {region}"


def _names(items: Iterable[WeightSlice]) -> str:
    """The target tensors, shortened where they are many."""
    names = list(dict.fromkeys(item.name for item in items))
    return f"'{names[0]}'" if len(names) == 1 else f"'{names[0]}' to '{names[-1]}' ({len(names)} tensors)"
