"""The writer streams what `safetensors` reads; the reader refuses what is not whole."""

import gc
import json
import random
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.checkpoint.formats.safetensors_file import SafetensorsFile, write_safetensors
from mrl.checkpoint.io.hashed_writer import xxh3_file
from mrl.errors import UserError

FUZZED = 400
"""Damaged copies of a small file; about 0.2 ms each."""


def example():
    values = torch.arange(60.0) / 7
    return {
        "scale": torch.tensor([0.5]),
        "w.float32": values[:12].view(3, 4),
        "scalar": torch.tensor(2.5),
        "b": values[:6].to(torch.bfloat16).view(2, 3),
        "empty": torch.empty(0, 4, dtype=torch.float16),
        "h": values[:5].to(torch.float16),
        "q": values[:9].to(torch.float8_e4m3fn).view(3, 3),
    }


def layout_of(tensors):
    return {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def write(path, tensors, metadata=None):
    return write_safetensors(path, layout_of(tensors), tensors.items(), metadata)


def test_safetensors_reads_what_is_written(tmp_path):
    tensors = example()
    record = write(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    assert record["num_bytes"] == (tmp_path / "x.safetensors").stat().st_size
    assert record["xxh3"] == xxh3_file(tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == set(tensors)
    assert all(same(found[name].reshape(-1), tensors[name].reshape(-1)) for name in tensors)
    assert all(found[name].shape == tensors[name].shape for name in tensors)


@pytest.mark.parametrize("name_length", range(1, 70, 9))
def test_data_begins_where_a_copy_from_memory_is_aligned(tmp_path, name_length):
    tensors = {"n" * name_length: torch.arange(5.0)}
    write(tmp_path / "x", tensors)
    (header,) = SafetensorsFile(tmp_path / "x").headers.values()
    assert header.start % 64 == 0
    assert torch.equal(load_file(tmp_path / "x")["n" * name_length], torch.arange(5.0))


def test_the_reader_returns_what_safetensors_wrote(tmp_path):
    tensors = example()
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.metadata == {"format": "pt"}
    assert {name: (header.shape, header.dtype) for name, header in file.headers.items()} == layout_of(tensors)
    for name, tensor in tensors.items():
        assert same(file.tensor(name).reshape(-1), tensor.reshape(-1))


def test_the_reader_keeps_the_order_of_the_bytes_and_copes_with_unaligned_tensors(tmp_path):
    odd = {"a": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]}}
    text = json.dumps({"z": {"dtype": "F32", "shape": [1], "data_offsets": [3, 7]}, **odd}).encode()
    data = bytes(3) + torch.tensor([1.5]).numpy().tobytes()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + data)
    file = SafetensorsFile(tmp_path / "x")
    assert list(file.headers) == ["a", "z"]
    assert file.tensor("z").tolist() == [1.5]


def test_one_tensor_is_held_at_a_time(tmp_path):
    alive, most = weakref.WeakSet(), 0

    def stream():
        nonlocal most
        for number in range(5):
            tensor = torch.full((4, 4), float(number))
            alive.add(tensor)
            gc.collect()
            most = max(most, len(alive))
            yield f"t{number}", tensor
            del tensor

    write_safetensors(tmp_path / "x", {f"t{n}": ((4, 4), "float32") for n in range(5)}, stream())
    assert most <= 2  # the one that is made, and the one whose name the writer's loop still holds
    assert SafetensorsFile(tmp_path / "x").tensor("t3").unique().tolist() == [3.0]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ([("a", torch.zeros(2))], "end before 'b'"),
        ([("b", torch.zeros(2)), ("a", torch.zeros(2))], "as the file.s next tensor"),
        ([("a", torch.zeros(3))], "as the file.s next tensor"),
        ([("a", torch.zeros(2, dtype=torch.float16))], "as the file.s next tensor"),
        (
            [("a", torch.zeros(2)), ("b", torch.zeros(2)), ("c", torch.zeros(2))],
            "expected None as the file.s next tensor",
        ),
    ],
)
def test_tensors_that_were_not_announced_are_a_defect(tmp_path, stream, message):
    announced = {"a": ((2,), "float32"), "b": ((2,), "float32")}
    with pytest.raises(RuntimeError, match=message):
        write_safetensors(tmp_path / "x", announced, stream)


def test_a_misaligned_tensor_is_a_defect(tmp_path):
    with pytest.raises(RuntimeError, match="'b'.*wider dtypes must come first"):
        write(tmp_path / "x", {"a": torch.zeros(3, dtype=torch.float8_e4m3fn), "b": torch.zeros(1)})


def test_a_full_disk_names_the_file():
    with pytest.raises(UserError, match="/dev/full.*No space left"):
        write("/dev/full", {"a": torch.zeros(100_000)})


def rewrite(path, change):
    """The file again, with a changed header."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    text = change(entries)
    text = (text if isinstance(text, str) else json.dumps(entries)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


DAMAGE = {
    "a hole": (lambda e: e["h"].update(shape=[4], data_offsets=[72, 80]), "starts at byte"),
    "a shape of other size": (lambda e: e["h"].update(shape=[7]), "cannot have"),
    "a negative size": (lambda e: e["h"].update(shape=[-5]), "has the shape"),
    "a float size": (lambda e: e["h"].update(shape=[5.0]), "has the shape"),
    "an unknown dtype": (lambda e: e["h"].update(dtype="F7"), "dtype 'F7'"),
    "a list as dtype": (lambda e: e["h"].update(dtype=["F16"]), "has the dtype"),
    "no offsets": (lambda e: e["h"].pop("data_offsets"), "lacks"),
    "a list as entry": (lambda e: e.update(h=[1]), "lacks"),
    "too few tensors": (lambda e: e.pop("q"), "end at byte"),
    "metadata of another kind": (lambda e: e.update(__metadata__=[1]), "__metadata__"),
    "a name twice": (lambda e: '{"h": {}, "h": {}}', "'h' twice"),
    "a list as header": (lambda e: "[]", "not a JSON object"),
    "no JSON": (lambda e: "{", "not JSON"),
}


@pytest.mark.parametrize(("change", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, change, message):
    write(tmp_path / "x", example())
    rewrite(tmp_path / "x", change)
    with pytest.raises(UserError, match=message) as error:
        SafetensorsFile(tmp_path / "x")
    assert str(tmp_path / "x") in str(error.value)


def test_every_truncation_is_refused(tmp_path):
    write(tmp_path / "x", example())
    data = (tmp_path / "x").read_bytes()
    for length in range(len(data)):
        (tmp_path / "y").write_bytes(data[:length])
        with pytest.raises(UserError, match="not a complete safetensors file"):
            SafetensorsFile(tmp_path / "y")


def test_random_damage_ends_in_a_user_error_or_a_readable_file(tmp_path):
    write(tmp_path / "x", example())
    data = (tmp_path / "x").read_bytes()
    generator = random.Random(5)
    refused = 0
    for _ in range(FUZZED):
        damaged = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        (tmp_path / "y").write_bytes(damaged)
        try:
            file = SafetensorsFile(tmp_path / "y")
            for name in file.headers:
                file.tensor(name)
        except UserError as error:
            assert str(tmp_path / "y") in str(error)
            refused += 1
    assert 0 < refused < FUZZED


def test_a_file_that_shrinks_while_it_is_open_is_refused(tmp_path):
    write(tmp_path / "x", example())
    file = SafetensorsFile(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"short")
    with pytest.raises(UserError, match="5 now"):
        file.tensor("h")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="nothing.safetensors' cannot be read: No such file"):
        SafetensorsFile(tmp_path / "nothing.safetensors")
