"""Delivery of slices to a sink, and the check that the delivered bits are those of the source.

A slice comes with the sum of its bits at the sender (`WeightSlice.source_sum`); without it the sum is computed here. A
sink that writes the slice sets the sum of the written bits (`WeightSlice.written_sum`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from mrl.resharding.checksum import MODULUS, bits
from mrl.resharding.weight_slice import WeightSlice

Sink = Callable[[Sequence[WeightSlice]], None]


def deliver(items: Sequence[WeightSlice], sink: Sink, where: str) -> tuple[int, bool]:
    """Passes slices to a sink and compares the sums of source bits and of delivered bits.

    Args:
        items: Slices; those without `source_sum` get the sum of their delivered bits.
        sink: Receives the slices.
        where: Prefix of error messages.

    Returns:
        (sum of the source bits modulo 2^64, whether all slices were written with `WeightSlice.write_to`).

    Raises:
        RuntimeError: The sink failed, or sums differ; the message names the tensors.
    """
    if not items:
        return 0, True
    try:
        sink(items)
    except Exception as error:
        raise RuntimeError(f"{where}: writing {_names(items)} failed: {error}") from error
    source_sums, delivered_sums = [], []
    for item in items:
        delivered = item.written_sum if item.written_sum is not None else bits(item.data)
        item.source_sum = item.source_sum if item.source_sum is not None else delivered
        delivered_sums.append(delivered)
        source_sums.append(item.source_sum)
    sums = torch.stack([torch.stack(source_sums), torch.stack(delivered_sums)]).tolist()  # waits for a GPU once
    for item, sent, arrived in zip(items, *sums, strict=True):
        if sent != arrived:
            raise RuntimeError(f"{where}: {describe_mismatch(item, sent, arrived)}")
    return sum(sums[0]) % MODULUS, all(item.written_sum is not None for item in items)


def describe_mismatch(item: WeightSlice, sent: int, arrived: int) -> str:
    """Returns an error message: a slice arrived damaged, or arrived intact and was not written as it is."""
    received = int(bits(item.data))
    region = f"'{item.name}' {list(item.region)}"
    if received == sent:
        return (
            f"checksum mismatch after writing {region}: expected {sent % MODULUS:016x}, stored "
            f"{arrived % MODULUS:016x}; a write was dropped or overwritten"
        )
    return (
        f"checksum mismatch on arrival of {region}: sent {sent % MODULUS:016x}, received {received % MODULUS:016x}; "
        "the data was damaged in transit"
    )


def _names(items: Iterable[WeightSlice]) -> str:
    """Formats the names of the target tensors; names only the first and the last if there are several."""
    names = list(dict.fromkeys(item.name for item in items))
    return f"'{names[0]}'" if len(names) == 1 else f"'{names[0]}' to '{names[-1]}' ({len(names)} tensors)"
