"""Boxes of a global tensor: which one holds what, and what is wrong with a set of them."""

import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.checkpoint.formats.checkpoint_metadata import METADATA
from mrl.checkpoint.formats.torch_dist import (
    Chunk,
    ChunkFiles,
    GlobalTensor,
    read_contents,
    write_blobs,
    write_contents,
)
from mrl.errors import UserError
from mrl.resharding.regions import full_region, slices


def tensor_of(shape, *boxes):
    """Boxes as (start, stop) for each dimension."""
    chunks = [
        Chunk(tuple(a for a, _ in box), tuple(b - a for a, b in box), "x.distcp", number, 1)
        for number, box in enumerate(boxes)
    ]
    return GlobalTensor(shape, "float32", tuple(chunks))


def test_the_boxes_of_a_region_are_found():
    boxes = [((layer, layer + 1), (row, row + 2), (0, 3)) for layer in range(4) for row in (0, 2)]
    found = tensor_of((4, 4, 3), *boxes).chunks_in(((1, 3), (1, 4), (0, 2)))
    assert [(chunk.offsets, inside) for chunk, inside in found] == [
        ((layer, row, 0), ((layer, layer + 1), rows, (0, 2)))
        for layer in (1, 2)
        for row, rows in ((0, (1, 2)), (2, (2, 4)))
    ]


PINWHEEL = [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1)), ((1, 2), (1, 2))]
"""Covers 3 x 3 once; no straight cut parts it."""


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        (PINWHEEL, None),
        (PINWHEEL[:-1], "lacks 1 of the elements"),
        ([*PINWHEEL[:-1], ((1, 2), (0, 2))], "twice"),
        ([((0, 3), (0, 3)), ((0, 1), (0, 1))], "twice"),
        ([((0, 3), (0, 2)), ((0, 3), (2, 3))], None),
        ([((0, 3), (0, 4))], "not inside its shape"),
        ([((0, 9),)], "not inside its shape"),
        ([], "lacks 9"),
    ],
)
def test_boxes_cover_a_tensor_exactly_once(boxes, words):
    tensor = tensor_of((3, 3), *boxes)
    if words is None:
        tensor.check_coverage()
    else:
        with pytest.raises(ValueError, match=words):
            tensor.check_coverage()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_cover_agrees_with_counting(data):
    axis = st.sampled_from([(a, b) for a in range(4) for b in range(a + 1, 5)])
    boxes = data.draw(st.lists(st.tuples(axis, axis, axis), min_size=1, max_size=5))
    count = torch.zeros(4, 4, 4)
    for box in boxes:
        count[slices(box)] += 1
    tensor = tensor_of((4, 4, 4), *boxes)
    if bool((count == 1).all()):
        tensor.check_coverage()
    else:
        with pytest.raises(ValueError, match="twice" if bool((count > 1).any()) else "lacks"):
            tensor.check_coverage()


def written(folder):
    """Two tensors in one file."""
    tensors = [torch.arange(12.0).view(3, 4), torch.arange(5.0)]
    with (folder / "__0_0.distcp").open("wb") as file:
        places = write_blobs(file, tensors)
    found = {
        f"t{number}": GlobalTensor(
            tuple(tensor.shape),
            "float32",
            (Chunk((0,) * tensor.dim(), tuple(tensor.shape), "__0_0.distcp", *places[number]),),
        )
        for number, tensor in enumerate(tensors)
    }
    write_contents(folder, found, empty=["m._extra_state/shard_0_1"], common={"iteration": 3})
    return tensors, found


def test_what_is_written_is_what_is_read(tmp_path):
    tensors, expected = written(tmp_path)
    contents = read_contents(tmp_path)
    assert contents.tensors == expected and contents.pickled == ("m._extra_state/shard_0_1",)
    files = ChunkFiles(tmp_path)
    files.check(chunk for tensor in contents.tensors.values() for chunk in tensor.chunks)
    for tensor, stored in zip(tensors, contents.tensors.values(), strict=True):
        assert torch.equal(files.read(stored.chunks[0], full_region(stored.shape), "float32"), tensor)
    assert torch.load(tmp_path / "common.pt", weights_only=True) == {"iteration": 3}


def test_a_reader_goes_to_another_process_without_its_maps(tmp_path):
    tensors, expected = written(tmp_path)
    files = ChunkFiles(tmp_path)
    chunk = expected["t1"].chunks[0]
    assert torch.equal(files.read(chunk, ((0, 5),), "float32"), tensors[1])
    assert len(pickle.dumps(files)) < 500
    assert torch.equal(pickle.loads(pickle.dumps(files)).read(chunk, ((1, 3),), "float32"), tensors[1][1:3])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_metadata_ends_in_one_error_or_is_read(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "fuzzed"
    if not folder.exists():
        folder.mkdir()
        written(folder)
        (folder / "whole").write_bytes((folder / METADATA).read_bytes())
    damaged = bytearray((folder / "whole").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    (folder / METADATA).write_bytes(damaged[: data.draw(st.integers(1, len(damaged)))])
    files = ChunkFiles(folder)
    try:
        tensors = read_contents(folder).tensors.values()
        files.check(itertools.chain.from_iterable(tensor.chunks for tensor in tensors))
        for tensor in tensors:
            tensor.check_coverage()
            for chunk in tensor.chunks:
                files.read(chunk, chunk.region, tensor.dtype)
    except (UserError, ValueError) as error:
        assert str(error)
