"""One tensor as torch.save writes it: torch reads ours, we read torch's, and neither runs what a file asks for."""

import io
import os
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrl.checkpoint.formats import torch_blob
from mrl.checkpoint.formats.torch_blob import ALIGNMENT, InvalidBlobError, blob_parts, read_blob

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDEX = (slice(0, 1), slice(1, 3), slice(2, 5))


def ours(tensor):
    return b"".join(bytes(part) for part in blob_parts(tensor))


def theirs(tensor):
    out = io.BytesIO()
    torch.save(tensor, out)
    return out.getvalue()


def values(dtype=torch.float32):
    return torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)


def mapped(data):
    """The bytes as a file that is mapped: the first one at an address that fits every dtype."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_loads_what_is_written(dtype):
    data = ours(values(dtype))
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert found.dtype == dtype and torch.equal(found, values(dtype))
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None, "the checksums are right"
    assert data == ours(values(dtype)), "the bytes depend on the tensor alone"


@pytest.mark.parametrize("write", [ours, theirs])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, ALIGNMENT, 7])
def test_a_part_is_read_wherever_the_blob_lies(offset, dtype, write):
    data = write(values(dtype))
    file = b"x" * offset + data + b"more"
    blob = read_blob(io.BytesIO(file), offset, len(data))
    assert (blob.start - offset) % ALIGNMENT == 0
    found = blob.read(mapped(file), INDEX)
    assert found.dtype == dtype and torch.equal(found, values(dtype)[INDEX])


def test_a_tensor_that_is_stored_transposed_is_read():
    tensor = values()[0].t()
    data = theirs(tensor)
    for offset in (0, 3):
        file = b"x" * offset + data
        blob = read_blob(io.BytesIO(file), offset, len(data))
        assert torch.equal(blob.read(mapped(file), (slice(1, 4), slice(0, 2))), tensor[1:4, :2])


def test_sizes_beyond_32_bits_stand_where_torch_and_zip_look(monkeypatch):
    """The limit is lowered: 4 GiB of values prove no more."""
    monkeypatch.setattr(torch_blob, "_LIMIT", 40)
    data = ours(values())
    assert torch.equal(torch.load(io.BytesIO(data), weights_only=True), values())
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    assert torch.equal(read_blob(io.BytesIO(data), 0, len(data)).read(mapped(data), INDEX), values()[INDEX])


class Attack:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("other", [{"a": torch.zeros(2)}, torch.zeros(2, dtype=torch.int64), [1], "text"])
def test_what_is_no_tensor_of_weights_is_refused(other):
    data = theirs(other)
    with pytest.raises(InvalidBlobError):
        read_blob(io.BytesIO(data), 0, len(data))


def test_code_is_refused_and_not_run(tmp_path):
    data = theirs(Attack(tmp_path / "harm"))
    with pytest.raises(InvalidBlobError, match="mkdir', which is not data"):
        read_blob(io.BytesIO(data), 0, len(data))
    assert not (tmp_path / "harm").exists()


def rewritten(data, **changes):
    """The archive with some entries replaced, or compressed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            method = zipfile.ZIP_DEFLATED if name.endswith(changes.get("compressed", "-")) else zipfile.ZIP_STORED
            target.writestr(name, changes.get(name.rpartition("/")[2], source.read(name)), method)
    return out.getvalue()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compressed": "data/0"}, "uncompressed"),
        ({"byteorder": b"big"}, "big-endian"),
        ({"0": b"short"}, "is not 60 uncompressed bytes"),
    ],
)
def test_another_storage_is_refused(changes, words):
    data = rewritten(ours(values()), **changes)
    with pytest.raises(InvalidBlobError, match=words):
        read_blob(io.BytesIO(data), 0, len(data))


@pytest.mark.parametrize(("first", "shape", "strides"), [(1, (15,), (1,)), (0, (4, 5), (5, 1)), (0, (15,), (-1,))])
def test_a_tensor_outside_its_storage_is_refused(first, shape, strides, monkeypatch):
    class Shifted(torch_blob._TensorPickler):
        def reducer_override(self, value):
            made = super().reducer_override(value)
            if made is NotImplemented:
                return made
            function, (storage, _, _, _, *rest) = made
            return function, (storage, first, shape, strides, *rest)

    out = io.BytesIO()
    Shifted(out, values()).dump(torch_blob._Marker())
    data = rewritten(ours(values()), **{"data.pkl": out.getvalue()})
    with pytest.raises(InvalidBlobError):
        read_blob(io.BytesIO(data), 0, len(data))


def test_every_shorter_file_is_refused():
    data = ours(values())
    for length in range(len(data)):
        with pytest.raises(InvalidBlobError):
            read_blob(io.BytesIO(data[:length]), 0, length)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_ends_in_one_error_or_in_a_tensor_inside_the_file(data):
    blob = bytearray(data.draw(st.sampled_from([ours(values()), theirs(values())])))
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read_blob(io.BytesIO(bytes(blob)), 0, len(blob))
    except InvalidBlobError:
        return
    found.read(mapped(blob), tuple(slice(None) for _ in found.shape))


def test_a_dtype_without_a_storage_class_is_refused():
    with pytest.raises(ValueError, match="float8"):
        ours(values().to(torch.float8_e4m3fn))


def test_pickles_are_those_of_torch():
    """The description itself, without the names of what stands around it."""
    mine, reference = (zipfile.ZipFile(io.BytesIO(write(values()))) for write in (ours, theirs))
    descriptions = []
    for archive in (mine, reference):
        name = next(entry for entry in archive.namelist() if entry.endswith("data.pkl"))
        descriptions.append(torch_blob._TensorUnpickler(io.BytesIO(archive.read(name))).load())
    assert descriptions[0] == descriptions[1]
