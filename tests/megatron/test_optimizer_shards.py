"""A run of a tensor's elements, as boxes of the tensor."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.megatron.optimizer_shards import rectangles

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_the_boxes_of_a_run_hold_its_elements_in_order(shape, data):
    count = math.prod(shape)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    whole = torch.arange(count).view(shape)
    boxes = list(rectangles(shape, start, stop))
    found = [whole[tuple(map(slice, offset, map(sum, zip(offset, size, strict=True))))] for offset, size in boxes]
    assert all(part.shape == size for part, (_, size) in zip(found, boxes, strict=True))
    assert torch.cat([part.flatten() for part in found] or [whole.flatten()[:0]]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
